// From the arguments of a mask to what the kernels take. Host code of CUDA builds only.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attention/mask_arguments.h"
#include "attention/mask_params.h"
#include "core/cuda_inputs.h"

namespace torchweld {

// The mask's numbers as the kernels want them, and the tensors that hold them.
struct MaskOnDevice {
  Tensor key_start, key_end, sink;
  AttentionMask mask{};

  explicit MaskOnDevice(const MaskArguments& args) {
    mask.window = args.rule(0, 0).window;
    // NOTE: in fp32 a smaller cap would be none, and a larger one infinite: neither tells a score.
    if (args.softcap) {
      mask.softcap = static_cast<float>(std::clamp<double>(*args.softcap, FLT_MIN, 1e30));
    }
    mask.key_start = data_of<int32_t>(key_start, args.key_start, at::kInt);
    mask.key_end = data_of<int32_t>(key_end, args.key_end, at::kInt);
    mask.sink = data_of<float>(sink, args.sink, at::kFloat);
  }

 private:
  template <typename T>
  static const T* data_of(Tensor& holder, const OptionalTensor& t, at::ScalarType dtype) {
    if (!is_given(t)) return nullptr;
    holder = t->to(dtype).contiguous();
    return const_data<T>(holder);
  }
};

}  // namespace torchweld
