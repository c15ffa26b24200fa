// int4_pack:    codes uint8 (..., cols) -> int32 words (..., ceil(cols/8)), lowest nibble first
// int4_unpack:  the inverse; the caller passes cols, because the last word may have unused nibbles
// int4_repack:  qweight (N, K/8), scale (N, groups), zero (N, ceil(groups/8)) -> the
//               repacked layout of int4/layout.h
//
// Only the low four bits of a code are used. The ops don't check the values of the codes, because
// the host would have to wait for the device.
#include <ATen/ops/empty.h>

#include <cstring>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "int4/checks.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "ops/int4_pack/int4_pack.h"
#endif

namespace torchweld::int4_pack_op {
namespace {

using Repacked = std::tuple<Tensor, Tensor, Tensor>;

// Calls body(i) for every i from 0 to count - 1, on torch's threads. A task handles kGrain values
// of i.
template <typename Body>
void for_each_word(int64_t count, const Body& body) {
  constexpr int64_t kGrain = 1 << 14;
  parallel_tasks((count + kGrain - 1) / kGrain, [&](int64_t task) {
    const int64_t end = std::min(count, (task + 1) * kGrain);
    for (int64_t i = task * kGrain; i < end; ++i) body(i);
  });
}

Tensor int4_pack_meta(const Tensor& codes) {
  check_dtype("int4_pack", "codes", codes, at::kByte);
  check_min_dim("int4_pack", "codes", codes, 1, "(..., cols)");
  return at::empty_symint(with_last(codes, ceil_div(codes.sym_size(-1), kInt4Unit)),
                          codes.options().dtype(at::kInt));
}

Tensor int4_unpack_meta(const Tensor& packed, c10::SymInt cols) {
  const char* op = "int4_unpack";
  check_dtype(op, "packed", packed, at::kInt);
  check_min_dim(op, "packed", packed, 1, "(..., ceil(cols/8))");
  TW_CHECK(cols >= 0 && ceil_div(cols, kInt4Unit) == packed.sym_size(-1), op,
           "packed must be (..., ceil(cols/8)) with cols = ", cols, ", but got ", describe(packed),
           "; a word holds 8 codes");
  return at::empty_symint(with_last(packed, cols), packed.options().dtype(at::kByte));
}

Repacked int4_repack_meta(const Tensor& qweight, const Tensor& scale, const Tensor& zero) {
  check_floating("int4_repack", "scale", scale);
  check_int4_weight("int4_repack", qweight, scale, zero, "scale", scale);
  const c10::SymInt tiles = ceil_div(qweight.sym_size(0), kInt4TileRows);
  const c10::SymInt chunks = ceil_div(qweight.sym_size(1), kInt4ChunkUnits);
  return {at::empty_symint({tiles, chunks, kInt4ChunkWords}, qweight.options()),
          at::empty_symint({tiles, scale.sym_size(1), kInt4TileRows}, scale.options()),
          at::empty_symint({tiles, scale.sym_size(1), 2}, zero.options())};
}

Tensor int4_pack_cpu(const Tensor& codes) {
  Tensor packed = int4_pack_meta(codes);
  if (packed.numel() == 0) return packed;
  const Tensor in = codes.contiguous();
  const auto* from = in.const_data_ptr<uint8_t>();
  auto* to = packed.mutable_data_ptr<int32_t>();
  const int64_t cols = codes.size(-1), words = packed.size(-1);
  for_each_word(packed.numel(), [&](int64_t index) {
    const int64_t column = index % words * kInt4Unit;
    const int64_t count = std::min<int64_t>(kInt4Unit, cols - column);
    uint32_t word = 0;
    for (int64_t i = 0; i < count; ++i) {
      word |= (from[index / words * cols + column + i] & 15u) << (4 * i);
    }
    to[index] = static_cast<int32_t>(word);
  });
  return packed;
}

Tensor int4_unpack_cpu(const Tensor& packed, int64_t cols) {
  Tensor codes = int4_unpack_meta(packed, cols);
  if (codes.numel() == 0) return codes;
  const Tensor in = packed.contiguous();
  const auto* from = in.const_data_ptr<int32_t>();
  auto* to = codes.mutable_data_ptr<uint8_t>();
  const int64_t words = packed.size(-1);
  for_each_word(packed.numel(), [&](int64_t index) {
    const int64_t column = index % words * kInt4Unit;
    const int64_t count = std::min<int64_t>(kInt4Unit, cols - column);
    for (int64_t i = 0; i < count; ++i) {
      to[index / words * cols + column + i] = static_cast<uint8_t>(int4_code(from[index], int(i)));
    }
  });
  return codes;
}

// Repacks scales of any dtype. `size` is the number of bytes in a scale.
void repack_scales(char* to, const char* from, int64_t size, const Int4Shape& shape) {
  for (int64_t tile = 0; tile < shape.tiles(); ++tile) {
    for (int64_t group = 0; group < shape.groups; ++group, to += kInt4TileRows * size) {
      for (int row = 0; row < kInt4TileRows; ++row) {
        const int64_t n = tile * kInt4TileRows + row;
        char* place = to + int4_scale_place(row) * size;
        if (n < shape.n) {
          std::memcpy(place, from + (n * shape.groups + group) * size, size);
        } else {
          std::memset(place, 0, size);
        }
      }
    }
  }
}

void repack_zeros(int32_t* to, const int32_t* from, const Int4Shape& shape) {
  const int64_t words = (shape.groups + kInt4Unit - 1) / kInt4Unit;
  for (int64_t index = 0; index < shape.tiles() * shape.groups * 2; ++index) {
    const int64_t first = index / 2 / shape.groups * kInt4TileRows + index % 2 * kInt4Unit;
    const int64_t group = index / 2 % shape.groups;
    uint32_t zeros = 0;
    for (int i = 0; i < kInt4Unit && first + i < shape.n; ++i) {
      const uint32_t word = from[(first + i) * words + group / kInt4Unit];
      zeros |= int4_code(word, int(group % kInt4Unit)) << (4 * i);
    }
    to[index] = static_cast<int32_t>(zeros);
  }
}

Repacked int4_repack_cpu(const Tensor& qweight, const Tensor& scale, const Tensor& zero) {
  auto [packed, packed_scale, packed_zero] = int4_repack_meta(qweight, scale, zero);
  if (packed.numel() == 0) return {packed, packed_scale, packed_zero};
  const Int4Shape shape = int4_shape(qweight, scale);
  const Tensor in_weight = qweight.contiguous(), in_scale = scale.contiguous();
  const Tensor in_zero = zero.contiguous();
  const auto* from = in_weight.const_data_ptr<int32_t>();
  auto* to = packed.mutable_data_ptr<int32_t>();
  for_each_word(shape.packed_words(), [&](int64_t index) {
    const int in_chunk = int(index % kInt4ChunkWords);
    const int64_t first_row = index / kInt4ChunkWords / shape.chunks() * kInt4TileRows;
    const int64_t first_unit = index / kInt4ChunkWords % shape.chunks() * kInt4ChunkUnits;
    const auto word_of = [&](int row, int unit) {
      const int64_t n = first_row + row, u = first_unit + unit;
      return n < shape.n && u < shape.units() ? uint32_t(from[n * shape.units() + u]) : 0u;
    };
    to[index] = static_cast<int32_t>(int4_repacked_word(in_chunk / 4, in_chunk % 4, word_of));
  });
  repack_scales(static_cast<char*>(packed_scale.mutable_data_ptr()),
                static_cast<const char*>(in_scale.const_data_ptr()), scale.element_size(), shape);
  repack_zeros(packed_zero.mutable_data_ptr<int32_t>(), in_zero.const_data_ptr<int32_t>(), shape);
  return {packed, packed_scale, packed_zero};
}

#ifdef TORCHWELD_CUDA
Tensor int4_pack_cuda(const Tensor& codes) {
  Tensor packed = int4_pack_meta(codes);
  if (packed.numel() == 0) return packed;
  const OnDevice on(codes.device());
  const Rows in(codes);
  launch_int4_pack(
      {const_data<uint8_t>(in.tensor), static_cast<uint32_t*>(packed.mutable_data_ptr()), in.rows,
       in.n, in.row_stride},
      current_stream());
  return packed;
}

Tensor int4_unpack_cuda(const Tensor& packed, int64_t cols) {
  Tensor codes = int4_unpack_meta(packed, cols);
  if (codes.numel() == 0) return codes;
  const OnDevice on(packed.device());
  const Rows in(packed);
  launch_int4_unpack({static_cast<const uint32_t*>(in.tensor.const_data_ptr()),
                      mutable_data<uint8_t>(codes), in.rows, cols, in.row_stride},
                     current_stream());
  return codes;
}

Repacked int4_repack_cuda(const Tensor& qweight, const Tensor& scale, const Tensor& zero) {
  auto [packed, packed_scale, packed_zero] = int4_repack_meta(qweight, scale, zero);
  const OnDevice on(scale.device());
  const auto strides = [](const Tensor& t) { return Int4Strides{t.stride(0), t.stride(1)}; };
  launch_int4_repack(
      {static_cast<const uint32_t*>(qweight.const_data_ptr()), scale.const_data_ptr(),
       static_cast<const uint32_t*>(zero.const_data_ptr()),
       static_cast<uint32_t*>(packed.mutable_data_ptr()), packed_scale.mutable_data_ptr(),
       static_cast<uint32_t*>(packed_zero.mutable_data_ptr()), int4_shape(qweight, scale),
       strides(qweight), strides(scale), strides(zero), dtype_of(scale)},
      current_stream());
  return {packed, packed_scale, packed_zero};
}
#endif

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "int4_pack(Tensor codes) -> Tensor", TW_KERNELS(int4_pack), no_gradient_function());
  define_op(m, "int4_unpack(Tensor packed, SymInt cols) -> Tensor", TW_KERNELS(int4_unpack),
            no_gradient_function());
  define_op(m,
            "int4_repack(Tensor qweight, Tensor scale, Tensor zero) -> "
            "(Tensor packed, Tensor packed_scale, Tensor packed_zero)",
            TW_KERNELS(int4_repack), no_gradient_function());
}

}  // namespace
}  // namespace torchweld::int4_pack_op
