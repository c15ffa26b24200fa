// Helpers to register an op that has a mask. mask_op makes one Mask from the mask arguments of the
// dispatcher's call. save_with_mask saves a Mask for the backward of an autograd function.
#pragma once

#include "attention/mask_arguments.h"
#include "core/dispatch.h"

namespace torchweld {

// The last arguments in the schema of an op that has a mask. The schema has leftpad, causal and
// scale before these arguments.
#define TW_MASK_SCHEMA                                                                    \
  "Tensor? key_start=None, Tensor? key_end=None, int? window=None, float? softcap=None, " \
  "Tensor? sink=None"
#define TW_ATTENTION_SCHEMA                                               \
  ", float dropout_p=0.0, Tensor? dropout_seed=None, Tensor? bias=None, " \
  "Tensor? alibi_slopes=None"

// The mask's arguments in a schema: without `causal`, where the mask is always causal; with it; and
// with attention's dropout, bias and ALiBi slopes too.
enum class MaskSchema { kCausal, kMask, kAttention };

// MaskOp<f, R(), arguments of f>::call gets the mask's arguments one by one, in the order of the
// schema, and calls f(before..., mask, scale, after...).
template <auto f, MaskSchema kSchema, typename Before, typename... Rest>
struct MaskOp;

template <auto f, MaskSchema kSchema, typename R, typename... Before, typename Next,
          typename... Rest>
struct MaskOp<f, kSchema, R(Before...), Next, Rest...>
    : MaskOp<f, kSchema, R(Before..., Next), Rest...> {};

template <auto f, typename R, typename... Before, typename Scale, typename... After>
struct MaskOp<f, MaskSchema::kAttention, R(Before...), const Mask&, Scale, After...> {
  static R call(Before... before, const OptionalTensor& leftpad, bool causal, Scale scale,
                const OptionalTensor& key_start, const OptionalTensor& key_end,
                std::optional<int64_t> window, std::optional<double> softcap,
                const OptionalTensor& sink, double dropout_p, const OptionalTensor& dropout_seed,
                const OptionalTensor& bias, const OptionalTensor& alibi_slopes, After... after) {
    return f(before...,
             Mask{leftpad, causal, key_start, key_end, window, softcap, sink, dropout_p,
                  dropout_seed, bias, alibi_slopes},
             scale, after...);
  }
};

template <auto f, typename R, typename... Before, typename Scale, typename... After>
struct MaskOp<f, MaskSchema::kMask, R(Before...), const Mask&, Scale, After...> {
  static R call(Before... before, const OptionalTensor& leftpad, bool causal, Scale scale,
                const OptionalTensor& key_start, const OptionalTensor& key_end,
                std::optional<int64_t> window, std::optional<double> softcap,
                const OptionalTensor& sink, After... after) {
    return f(before..., Mask{leftpad, causal, key_start, key_end, window, softcap, sink}, scale,
             after...);
  }
};

template <auto f, typename R, typename... Before, typename Scale, typename... After>
struct MaskOp<f, MaskSchema::kCausal, R(Before...), const Mask&, Scale, After...> {
  static R call(Before... before, const OptionalTensor& leftpad, Scale scale,
                const OptionalTensor& key_start, const OptionalTensor& key_end,
                std::optional<int64_t> window, std::optional<double> softcap,
                const OptionalTensor& sink, After... after) {
    return f(before..., Mask{leftpad, /*causal=*/true, key_start, key_end, window, softcap, sink},
             scale, after...);
  }
};

template <auto f, MaskSchema kSchema, typename R, typename... Args>
constexpr auto mask_op_of(R (*)(Args...)) {
  return &MaskOp<f, kSchema, R(), Args...>::call;
}

// The functions that the dispatcher calls for f, for each MaskSchema.
template <auto f>
constexpr auto causal_mask_op = mask_op_of<f, MaskSchema::kCausal>(f);
template <auto f>
constexpr auto mask_op = mask_op_of<f, MaskSchema::kMask>(f);
template <auto f>
constexpr auto attention_mask_op = mask_op_of<f, MaskSchema::kAttention>(f);

// The number of tensors in a Mask. save_with_mask saves these tensors after the tensors of the op.
constexpr size_t kMaskTensors = 7;

inline void save_with_mask(AutogradContext* ctx, variable_list tensors, const Mask& mask) {
  for (const OptionalTensor* t : {&mask.leftpad, &mask.key_start, &mask.key_end, &mask.sink,
                                  &mask.dropout_seed, &mask.bias, &mask.alibi_slopes}) {
    tensors.push_back(or_undefined(*t));
  }
  ctx->save_for_backward(std::move(tensors));
  ctx->saved_data["causal"] = mask.causal;
  ctx->saved_data["window"] = mask.window;
  ctx->saved_data["softcap"] = mask.softcap;
  ctx->saved_data["dropout_p"] = mask.dropout_p;
}

inline Mask saved_mask(AutogradContext* ctx, const variable_list& saved) {
  const Tensor* const t = saved.data() + saved.size() - kMaskTensors;
  return {optional(t[0]),
          ctx->saved_data["causal"].toBool(),
          optional(t[1]),
          optional(t[2]),
          ctx->saved_data["window"].toOptional<int64_t>(),
          ctx->saved_data["softcap"].toOptional<double>(),
          optional(t[3]),
          ctx->saved_data["dropout_p"].toDouble(),
          optional(t[4]),
          optional(t[5]),
          optional(t[6])};
}

}  // namespace torchweld
