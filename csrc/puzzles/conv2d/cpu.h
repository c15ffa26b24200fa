// CPU: convolution of single-channel images. An image is processed in strips of rows. Each strip is
// copied, with its halo, to a buffer that is padded with zeros. Therefore no sum needs bounds
// checks. The elements of the buffer have the dtype of the accumulator.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"

namespace torchweld {

constexpr int64_t kStripRows = 16;
constexpr int64_t kLanes = 8;  // number of independent accumulators

struct ConvShape {
  int64_t batch, height, width, kernel_height, kernel_width;

  ConvShape(const Tensor& x, const Tensor& weight)
      : batch(x.size(0)),
        height(x.size(1)),
        width(x.size(2)),
        kernel_height(weight.size(0)),
        kernel_width(weight.size(1)) {}

  int64_t strips() const { return (height + kStripRows - 1) / kStripRows; }
  // padded_width() is the width of an image, rounded up to whole groups of lanes. pitch() is the
  // length of a row of the buffer: the padded width plus the halo.
  int64_t padded_width() const { return (width + 4 * kLanes - 1) / (4 * kLanes) * (4 * kLanes); }
  int64_t pitch() const { return padded_width() + kernel_width - 1; }
  int64_t buffer() const { return (kStripRows + kernel_height - 1) * pitch(); }
  // Returns the number of tasks for `units` units of work, if each unit consists of `products`
  // products.
  int64_t tasks(int64_t units, int64_t products) const {
    constexpr int64_t kProducts = 1 << 18, kMax = 64;
    const int64_t per_task = std::max<int64_t>(1, kProducts / products);
    return std::min((units + per_task - 1) / per_task, kMax);
  }
};

// Copies rows [row, row + rows) of an image, padded with zeros. The first copied column is column
// -left of the image.
template <typename scalar_t, typename acc_t>
void copy_strip(acc_t* to, const scalar_t* image, const ConvShape& s, int64_t row, int64_t rows,
                int64_t left) {
  for (int64_t r = 0; r < rows; ++r, to += s.pitch()) {
    std::fill_n(to, s.pitch(), acc_t(0));
    if (row + r < 0 || row + r >= s.height) continue;
    const scalar_t* from = image + (row + r) * s.width;
    for (int64_t c = 0; c < s.width; ++c) to[left + c] = static_cast<acc_t>(from[c]);
  }
}

// Computes kColumns contiguous outputs and stores only the first `columns` outputs.
template <int64_t kColumns, typename scalar_t, typename acc_t>
void convolve_columns(scalar_t* z, const acc_t* x, const acc_t* weight, const ConvShape& s,
                      int64_t columns) {
  acc_t sums[kColumns] = {};
  for (int64_t p = 0; p < s.kernel_height; ++p) {
    for (int64_t q = 0; q < s.kernel_width; ++q) {
      const acc_t w = weight[p * s.kernel_width + q];
      const acc_t* from = x + p * s.pitch() + q;
      for (int64_t c = 0; c < kColumns; ++c) sums[c] += w * from[c];
    }
  }
  for (int64_t c = 0; c < std::min(columns, kColumns); ++c) z[c] = static_cast<scalar_t>(sums[c]);
}

// Computes z of conv2d. If `flipped` is true, computes the gradient with respect to x instead. x
// and weight must be contiguous.
inline void conv2d_into(Tensor& z, const Tensor& x, const Tensor& weight, bool flipped) {
  const ConvShape s(x, weight);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "conv2d", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const int64_t taps = weight.numel();
    std::vector<acc_t> weights(taps);
    for (int64_t i = 0; i < taps; ++i) {
      weights[i] =
          static_cast<acc_t>(weight.const_data_ptr<scalar_t>()[flipped ? taps - 1 - i : i]);
    }
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    scalar_t* to = z.mutable_data_ptr<scalar_t>();
    const int64_t above = flipped ? s.kernel_height - 1 : 0;
    const int64_t left = flipped ? s.kernel_width - 1 : 0;
    const int64_t units = s.batch * s.strips();
    const int64_t tasks = s.tasks(units, kStripRows * s.width * taps);
    parallel_tasks(tasks, [&](int64_t task) {
      std::vector<acc_t> buffer(s.buffer());
      for (int64_t unit = task * units / tasks; unit < (task + 1) * units / tasks; ++unit) {
        const int64_t image = unit / s.strips(), row = unit % s.strips() * kStripRows;
        const int64_t rows = std::min(kStripRows, s.height - row);
        copy_strip(buffer.data(), from + image * s.height * s.width, s, row - above,
                   rows + s.kernel_height - 1, left);
        for (int64_t r = 0; r < rows; ++r) {
          const acc_t* in = buffer.data() + r * s.pitch();
          scalar_t* out = to + (image * s.height + row + r) * s.width;
          for (int64_t c = 0; c < s.width;) {
            if (s.width - c <= kLanes) {
              convolve_columns<kLanes>(out + c, in + c, weights.data(), s, s.width - c);
              c += kLanes;
            } else {
              convolve_columns<4 * kLanes>(out + c, in + c, weights.data(), s, s.width - c);
              c += 4 * kLanes;
            }
          }
        }
      }
    });
  });
}

// Adds sum_ij dz[i, j] * x[i + p, j + q] to element (p, q) of sums (taps,), for all taps (p, q).
// The outputs (i, j) are those of one strip. dz and x are buffers that copy_strip has filled.
template <typename acc_t>
void add_products(double* sums, const acc_t* dz, const acc_t* x, const ConvShape& s, int64_t rows) {
  for (int64_t p = 0; p < s.kernel_height; ++p) {
    for (int64_t q = 0; q < s.kernel_width; ++q) {
      acc_t lanes[kLanes] = {};
      for (int64_t r = 0; r < rows; ++r) {
        const acc_t* a = dz + r * s.pitch();
        const acc_t* b = x + (r + p) * s.pitch() + q;
        for (int64_t c = 0; c < s.width; c += kLanes) {
          for (int64_t k = 0; k < kLanes; ++k) lanes[k] += a[c + k] * b[c + k];
        }
      }
      for (int64_t k = 0; k < kLanes; ++k) sums[p * s.kernel_width + q] += lanes[k];
    }
  }
}

// Computes dweight of conv2d. dz and x must be contiguous.
// NOTE: the strips of all images form groups. Each group has its own sums. The number of groups
// does not depend on the number of threads, and the sums of the groups are added in order.
// Therefore results have the same bits in every run.
inline void conv2d_dweight_into(Tensor& dweight, const Tensor& dz, const Tensor& x) {
  const ConvShape s(x, dweight);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "conv2d", [&] {
    using acc_t = at::opmath_type<scalar_t>;
    const int64_t units = s.batch * s.strips(), taps = dweight.numel();
    const int64_t groups = s.tasks(units, kStripRows * s.width * taps);
    std::vector<double> partials(groups * taps);
    parallel_tasks(groups, [&](int64_t group) {
      std::vector<acc_t> buffer(s.buffer()), rows_of_dz(kStripRows * s.pitch());
      for (int64_t unit = group * units / groups; unit < (group + 1) * units / groups; ++unit) {
        const int64_t image = unit / s.strips() * s.height * s.width;
        const int64_t row = unit % s.strips() * kStripRows;
        const int64_t rows = std::min(kStripRows, s.height - row);
        copy_strip(rows_of_dz.data(), dz.const_data_ptr<scalar_t>() + image, s, row, rows, 0);
        copy_strip(buffer.data(), x.const_data_ptr<scalar_t>() + image, s, row,
                   rows + s.kernel_height - 1, 0);
        add_products(partials.data() + group * taps, rows_of_dz.data(), buffer.data(), s, rows);
      }
    });
    scalar_t* to = dweight.mutable_data_ptr<scalar_t>();
    for (int64_t tap = 0; tap < taps; ++tap) {
      double sum = 0;
      for (int64_t group = 0; group < groups; ++group) sum += partials[group * taps + tap];
      to[tap] = static_cast<scalar_t>(static_cast<acc_t>(sum));
    }
  });
}

}  // namespace torchweld
