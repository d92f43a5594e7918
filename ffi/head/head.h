// What begins and ends a pass on a GPU: angles, embedding norm, LM head with its largest logits, log-probabilities. The
// functions of cpu/phases.h of the same names, on a stream.
//
// Pointers are device memory. Nothing is allocated and nothing waits for the device, so every function can be recorded
// into a graph. Each returns what its launches answered.
//
// Bits: those of the CPU, but for Head, whose sums inside a range of K are the tensor cores'. A row's bits depend on no
// other row, on no padding, and not on how many slices or rows there are. A NaN stays a NaN, of other bits perhaps.
#pragma once

#include <cuda_runtime.h>

#include "common/model.h"

namespace musejax::head {

using bf16 = uint16_t;

// positions [rows], inv_freq [thetas][half] -> cos_sin [thetas][rows][2][half].
cudaError_t Angles(cudaStream_t, const int32_t* positions, const float* inv_freq, int64_t thetas, int64_t rows,
                   int64_t half, float* cos_sin);

// rows [kSlices][count][hidden / kSlices] -> stream [count][hidden].
cudaError_t EmbedNorm(cudaStream_t, const Model&, const bf16* rows, int64_t count, float* stream);

// stream [count][hidden], final_norm [hidden], lm_head [slices][HeadBytes] -> raw [slices][count][vocab / kSlices].
// count: 1 to kMaxRows. scales: room for `count` floats, undefined afterwards.
cudaError_t Head(cudaStream_t, const Model&, const float* stream, const bf16* final_norm, const uint8_t* lm_head,
                 int64_t slices, int64_t count, float* scales, float* raw);

// raw -> the `top` largest below num_tokens: values, ids [slices][count][top]. begin: the first slice here, [1].
cudaError_t HeadTop(cudaStream_t, const Model&, const float* raw, const int32_t* begin, int64_t slices, int64_t count,
                    int64_t num_tokens, int64_t top, float* values, int32_t* ids);

// raw, largest [count] -> sums [slices][count].
cudaError_t HeadSums(cudaStream_t, const Model&, const float* raw, const float* largest, const int32_t* begin,
                     int64_t slices, int64_t count, int64_t num_tokens, float* sums);

// raw, largest [count], sums [kSlices][count] -> logprobs [count].
cudaError_t LogProbability(cudaStream_t, const Model&, const float* raw, const float* largest, const float* sums,
                           int64_t count, float* logprobs);

// raw [n] -> logits [n].
cudaError_t Softcap(cudaStream_t, const Model&, const float* raw, int64_t n, float* logits);

}  // namespace musejax::head
