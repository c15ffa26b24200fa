// Computes causal_conv1d and its gradients on the CPU. A task processes a chunk of positions of
// one sequence, for a block of channels, and keeps the last rows of x in the dtype A of the
// computation. The tasks depend on the shape alone, so the results have the same bits with any
// number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/index.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"

namespace torchweld::causal_conv1d_op {

constexpr int64_t kTaps = 4;  // the largest width

template <typename T>
struct CpuConv {
  const T* x;            // (batch, seqlen, channels), the stride of the channels is 1
  int64_t x_strides[2];  // of batch and position
  const T* state;        // (batch, width - 1, channels) contiguous, or nullptr
  const int32_t* key_start;
  int64_t batch, seqlen, channels, width;
  bool silu;
};

// The chunks of positions and the blocks of channels.
struct CpuConvTasks {
  static constexpr int64_t kSteps = 128, kBlock = 256;
  int64_t chunks, blocks, count;

  template <typename T>
  explicit CpuConvTasks(const CpuConv<T>& p)
      : chunks(divide_up(p.seqlen, kSteps)),
        blocks(divide_up(p.channels, kBlock)),
        count(p.batch * chunks * blocks) {}
};

// The rows of x that a position sees, for a block of channels. row(j) is at position t - j.
template <typename T, typename A>
struct CpuConvWindow {
  const CpuConv<T>& p;
  int64_t b, begin, end, channel, n;
  std::array<std::array<A, CpuConvTasks::kBlock>, kTaps> rows;
  int64_t newest = 0;

  CpuConvWindow(const CpuConv<T>& p, const CpuConvTasks& tasks, int64_t task) : p(p) {
    channel = task % tasks.blocks * tasks.kBlock;
    n = std::min(tasks.kBlock, p.channels - channel);
    begin = task / tasks.blocks % tasks.chunks * tasks.kSteps;
    end = std::min(begin + tasks.kSteps, p.seqlen);
    b = task / tasks.blocks / tasks.chunks;
  }

  inline A* row(int64_t j) { return rows[(newest + kTaps - j) % kTaps].data(); }

  // Reads the rows in front of the chunk.
  inline void fill() {
    for (int64_t t = begin - p.width + 1; t < begin; ++t) advance(t);
  }

  inline void advance(int64_t t) {
    newest = (newest + 1) % kTaps;
    A* __restrict__ to = row(0);
    const T* __restrict__ from =
        t >= 0 ? p.x + b * p.x_strides[0] + t * p.x_strides[1] + channel
        : p.state != nullptr
            ? p.state + (b * (p.width - 1) + t + p.width - 1) * p.channels + channel
            : nullptr;
    for (int64_t c = 0; c < n; ++c) to[c] = from != nullptr ? static_cast<A>(from[c]) : A(0);
  }

  // The number of positions that position t sees, itself among them.
  inline int64_t taps(int64_t t) const {
    if (p.key_start == nullptr) return p.width;
    return std::clamp<int64_t>(t - p.key_start[b * p.seqlen + t] + 1, 0, p.width);
  }

  // weights is (width, channels): row j multiplies position t - j.
  inline void products(A* __restrict__ z, const A* weights, const A* bias, int64_t taps) {
    for (int64_t c = 0; c < n; ++c) z[c] = bias[channel + c];
    for (int64_t j = taps - 1; j >= 0; --j) {
      const A* __restrict__ w = weights + j * p.channels + channel;
      const A* __restrict__ x = row(j);
      for (int64_t c = 0; c < n; ++c) z[c] += w[c] * x[c];
    }
  }
};

template <typename T, typename A>
void convolve_cpu(const CpuConv<T>& p, const A* weights, const A* bias, T* y) {
  const CpuConvTasks tasks(p);
  parallel_tasks(tasks.count, [&](int64_t task) {
    with_vectors([&] {
      CpuConvWindow<T, A> window(p, tasks, task);
      window.fill();
      std::array<A, CpuConvTasks::kBlock> z;
      for (int64_t t = window.begin; t < window.end; ++t) {
        window.advance(t);
        window.products(z.data(), weights, bias, window.taps(t));
        T* __restrict__ to = y + (window.b * p.seqlen + t) * p.channels + window.channel;
        for (int64_t c = 0; c < window.n; ++c) {
          to[c] = round_to<T>(p.silu ? z[c] / (A(1) + exp_in_vectors(-z[c])) : z[c]);
        }
      }
    });
  });
}

template <typename T, typename A>
struct CpuConvGradients {
  T* dx;      // (batch, seqlen, channels), or nullptr if not requested
  T* dstate;  // (batch, width - 1, channels), or nullptr
  // For each chunk of each sequence: (width, channels) of dweight, as in `weights`, and (channels)
  // of dbias.
  double* sums;
};

template <typename T, typename A>
void convolve_backward_cpu(const CpuConv<T>& p, const T* dy, const int64_t (&dy_strides)[2],
                           const A* weights, const A* bias, const CpuConvGradients<T, A>& out) {
  using Row = std::array<A, CpuConvTasks::kBlock>;
  const CpuConvTasks tasks(p);
  const int64_t sums = (p.width + 1) * p.channels;
  parallel_tasks(tasks.count, [&](int64_t task) {
    with_vectors([&] {
      CpuConvWindow<T, A> window(p, tasks, task);
      window.fill();
      const int64_t n = window.n, channel = window.channel;
      Row dz, z;
      std::array<Row, kTaps> dx = {};  // of positions t - kTaps + 1 .. t, a ring
      // 16 positions are added up in A, then in fp64.
      std::array<Row, kTaps + 1> group = {};
      double* chunk_sums = out.sums + task / tasks.blocks * sums + channel;
      for (int64_t j = 0; j <= p.width; ++j) std::fill_n(chunk_sums + j * p.channels, n, 0.0);
      const auto add_group = [&] {
        for (int64_t j = 0; j <= p.width; ++j) {
          double* __restrict__ to = chunk_sums + j * p.channels;
          for (int64_t c = 0; c < n; ++c) to[c] += static_cast<double>(group[j][c]);
          group[j].fill(0);
        }
      };
      const auto of = [&](int64_t t) -> Row& { return dx[(t + kTaps) % kTaps]; };
      for (int64_t t = window.begin; t < window.end + p.width - 1; ++t) {
        of(t).fill(0);
        if (t < p.seqlen) {
          window.advance(t);
          const int64_t taps = window.taps(t);
          const T* __restrict__ from = dy + window.b * dy_strides[0] + t * dy_strides[1] + channel;
          for (int64_t c = 0; c < n; ++c) dz[c] = static_cast<A>(from[c]);
          if (p.silu) {
            window.products(z.data(), weights, bias, taps);
            for (int64_t c = 0; c < n; ++c) {
              const A s = A(1) / (A(1) + exp_in_vectors(-z[c]));
              const A complement = A(1) / (A(1) + exp_in_vectors(z[c]));
              dz[c] *= s * (A(1) + z[c] * complement);
            }
          }
          for (int64_t j = 0; j < taps; ++j) {
            A* __restrict__ to = of(t - j).data();
            const A* __restrict__ w = weights + j * p.channels + channel;
            for (int64_t c = 0; c < n; ++c) to[c] += w[c] * dz[c];
          }
          if (t < window.end) {
            for (int64_t j = 0; j < taps; ++j) {
              A* __restrict__ to = group[j].data();
              const A* __restrict__ x = window.row(j);
              for (int64_t c = 0; c < n; ++c) to[c] += dz[c] * x[c];
            }
            A* __restrict__ to = group[p.width].data();
            for (int64_t c = 0; c < n; ++c) to[c] += dz[c];
            if (t % 16 == 15 || t + 1 == window.end) add_group();
          }
        }
        const int64_t done = t - p.width + 1;
        T* to = nullptr;
        if (done >= window.begin) {
          if (out.dx) to = out.dx + (window.b * p.seqlen + done) * p.channels + channel;
        } else if (done < 0 && out.dstate != nullptr) {
          to = out.dstate + (window.b * (p.width - 1) + done + p.width - 1) * p.channels + channel;
        }
        if (to == nullptr) continue;
        const Row& from = of(done);
        for (int64_t c = 0; c < n; ++c) to[c] = round_to<T>(from[c]);
      }
    });
  });
}

}  // namespace torchweld::causal_conv1d_op
