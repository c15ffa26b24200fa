// CPU: access to the rows of a 4-bit weight in either layout, and to values of any dtype.
#pragma once

#include "core/check.h"
#include "int4/layout.h"

namespace torchweld {

// Reads the values of a tensor of dtype float, Half or BFloat16 as floats. A kernel that reads few
// values this way is compiled once, not once per dtype.
struct FloatReader {
  at::ScalarType dtype;
  const void* data;

  explicit FloatReader(const Tensor& t) : dtype(t.scalar_type()), data(t.const_data_ptr()) {}

  float operator[](int64_t i) const {
    switch (dtype) {
      case at::kFloat:
        return static_cast<const float*>(data)[i];
      case at::kHalf:
        return static_cast<const at::Half*>(data)[i];
      default:
        return static_cast<const at::BFloat16*>(data)[i];
    }
  }
};

// Stores floats, rounded, in a contiguous tensor of dtype float, Half or BFloat16.
struct FloatWriter {
  at::ScalarType dtype;
  void* data;

  explicit FloatWriter(const Tensor& t) : dtype(t.scalar_type()), data(t.mutable_data_ptr()) {}

  void set(int64_t i, float value) const {
    switch (dtype) {
      case at::kFloat:
        static_cast<float*>(data)[i] = value;
        return;
      case at::kHalf:
        static_cast<at::Half*>(data)[i] = value;
        return;
      default:
        static_cast<at::BFloat16*>(data)[i] = value;
    }
  }
};

struct Int4WeightOnCpu {
  Int4Shape shape;
  Tensor packed, scales, zeros;  // all three are contiguous
  const uint32_t* word_data = static_cast<const uint32_t*>(packed.const_data_ptr());
  const int32_t* zero_data = zeros.const_data_ptr<int32_t>();
};

// A weight in the portable layout. words() returns a pointer to `units` portable words of a row,
// from unit `unit` on. The pointer may point into `buffer`. scale_at() returns the index of the
// scale of a row and a group. zero() returns the zero of a row and a group.
struct PortableInt4 : Int4WeightOnCpu {
  const uint32_t* words(int64_t row, int64_t unit, int64_t units, uint32_t* buffer) const {
    return word_data + row * shape.units() + unit;
  }
  int64_t scale_at(int64_t row, int64_t group) const { return row * shape.groups + group; }
  int zero(int64_t row, int64_t group) const {
    const int64_t row_words = (shape.groups + kInt4Unit - 1) / kInt4Unit;
    const auto* from = zero_data + row * row_words + group / kInt4Unit;
    return int(int4_code(uint32_t(*from), int(group % kInt4Unit)));
  }
};

struct RepackedInt4 : Int4WeightOnCpu {
  const uint32_t* words(int64_t row, int64_t unit, int64_t units, uint32_t* buffer) const {
    const auto* chunks = word_data + row / kInt4TileRows * shape.chunks() * kInt4ChunkWords;
    for (int64_t u = 0; u < units; ++u) {
      const int64_t source = unit + u;
      buffer[u] = int4_portable_word(chunks + source / kInt4ChunkUnits * kInt4ChunkWords,
                                     int(row % kInt4TileRows), int(source % kInt4ChunkUnits));
    }
    return buffer;
  }
  int64_t scale_at(int64_t row, int64_t group) const {
    const int64_t tile_group = row / kInt4TileRows * shape.groups + group;
    return tile_group * kInt4TileRows + int4_scale_place(int(row % kInt4TileRows));
  }
  int zero(int64_t row, int64_t group) const {
    const int64_t tile_group = row / kInt4TileRows * shape.groups + group;
    const int64_t word = tile_group * 2 + row % kInt4TileRows / kInt4Unit;
    return int(int4_code(uint32_t(zero_data[word]), int(row % kInt4Unit)));
  }
};

}  // namespace torchweld
