// Host side of the layer kernel: which sizes it was compiled for, its workspace, its launch and its errors.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <string>
#include <vector>

#include "common/layout.h"
#include "layer/sizes.h"

namespace musejax::layer {

struct PassParams;   // context.cuh
struct PhaseParams;  // phases.h

// Sizes of one instance (Sizes in sizes.h).
struct Instance {
  int hidden, heads, kv_heads, head_dim, moe_hidden, moe_inner, experts, top_k, slices;
  std::array<int, kDenseGemms> dense_units;  // of a rank, in the order of enum Dense
  int64_t (*frame_bytes)(int max_units);     // of one parity
  cudaError_t (*launch)(const PassParams& pass, int blocks, cudaStream_t stream);
  cudaError_t (*launch_phase)(const PhaseParams& params, int blocks, cudaStream_t stream);  // or null
  int (*min_blocks)();  // fewer cannot hold the residual stream
};

const std::vector<Instance>& Instances();
// The instance of a model for a rank of `slices` slices, null if there is none.
const Instance* FindInstance(const Shape& shape, int64_t top_k, int64_t slices);

// Ordinals of the GPUs that share a model, in the order of their ranks.
using Devices = std::vector<int>;

// From now on launches of Instances()[instance] on GPUs of `blocks` SMs run these units of the dense GEMMs; no such
// launch may be running. Only shape and ranges are checked: musejax/kernels/schedule.py makes and checks schedules.
//   spans: [blocks][kDenseGemms][2], units begin .. end - 1 of each GEMM
// Throws std::invalid_argument, or std::runtime_error with the CUDA error.
void SetSchedule(int instance, int blocks, const std::vector<int32_t>& spans);
// SMs of each GPU here; empty without one.
std::vector<int> Multiprocessors();

// What a launch needs beside its operands: schedule, frames, epochs, abort flag; one per instance, capacity and rank,
// kept for the life of the process. Frames are memory of their device in which the kernels of the other ranks write,
// never XLA's: their addresses are in the graphs of all ranks.
struct Workspace {
  int32_t* schedule;
  uint8_t* frames;
  uint32_t *epochs, *abort, *budget;
  uint64_t* stamps;  // null in builds without MUSEJAX_LAYER_STAMPS
  int device, blocks, max_units;
};
// Workspaces of all ranks, one a device. Those of several devices Connect makes, before the first launch; that of one
// is made on first use (not while a graph is captured).
// Throws std::runtime_error with the CUDA error, if no schedule was set, or if the devices are not connected.
const std::vector<Workspace>& WorkspacesOf(const Instance& instance, int64_t slots, const Devices& devices);
// Makes the workspaces of several devices, whose kernels may write each other's memory from then on (comm/peers.h). By
// one thread, while no launch of the instance runs.
// Throws std::invalid_argument or std::runtime_error.
void Connect(int instance, int64_t slots, const Devices& devices);

// For tests: from the next launch on the epochs of the ranks on this device are `by` further, so that they and the
// other ranks no longer know each other's words; until ResetAfterError. No launch of the instance may be running.
// Returns how many workspaces there were.
// Throws std::invalid_argument, or std::runtime_error with the CUDA error.
int ShiftEpochs(int instance, int device, uint32_t by);

// After an error (comm/errors.h): waits for all launches, then clears all workspaces.
cudaError_t ResetAfterError();

// Stamps of the last launch of the workspace made last on the current device, [blocks][warps][layers][points]; empty in
// builds without MUSEJAX_LAYER_STAMPS.
std::vector<uint64_t> Stamps();

// The budget of comm/errors.h for launches from now on, on all devices.
cudaError_t WriteBudgets();

}  // namespace musejax::layer
