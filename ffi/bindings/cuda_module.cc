// Python module musejax._cuda: the CUDA handlers under the target names that both platforms share, and the measurement
// of the GPU's limits.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bench/limits.h"
#include "bindings/module.h"
#include "comm/errors.h"
#include "draft/draft.h"
#include "layer/layer.h"

extern "C" {
musejax::Handler MusejaxBuildInfoCuda, MusejaxAnglesCuda, MusejaxEmbedNormCuda, MusejaxHeadCuda, MusejaxHeadSumsCuda,
    MusejaxLogprobCuda, MusejaxSoftcapCuda, MusejaxLayersCuda, MusejaxLayersLoopedCuda, MusejaxAttnInCuda,
    MusejaxAttentionCuda, MusejaxAttnOutCuda, MusejaxPoolCuda, MusejaxExpertsUpCuda, MusejaxExpertsDownCuda,
    MusejaxCombineCuda, MusejaxCombinePartialsCuda, MusejaxCombineGatheredCuda, MusejaxUnpoolCuda, MusejaxAddFfnCuda,
    MusejaxDraftCuda, MusejaxDraftLoopedCuda, MusejaxDraftCommitCuda, MusejaxDraftCommitLoopedCuda,
    MusejaxDraftTreeCuda;
}

namespace {

namespace nb = nanobind;
using musejax::bench::LimitRow;

// limits(device, groups) -> [{"name": "hbm.steady", ...}], the fields of LimitRow; status is ok, failed or skipped.
nb::list Limits(int device, const std::vector<std::string>& groups) {
  std::vector<LimitRow> rows;
  {
    const nb::gil_scoped_release release;
    rows = musejax::bench::MeasureLimits(device, groups);
  }
  nb::list out;
  for (const LimitRow& row : rows) {
    constexpr const char* statuses[] = {"ok", "failed", "skipped"};
    nb::dict fields;
    fields["name"] = row.name, fields["what"] = row.what, fields["unit"] = row.unit;
    fields["figure"] = row.figure, fields["low"] = row.low, fields["high"] = row.high;
    fields["repeats"] = row.repeats, fields["design"] = row.design, fields["note"] = row.note;
    fields["status"] = statuses[static_cast<int>(row.status)];
    out.append(fields);
  }
  return out;
}

}  // namespace

NB_MODULE(_cuda, m) {
  musejax::DefineModule(m, {
                               {"musejax_build_info", MusejaxBuildInfoCuda},
                               {"musejax_angles", MusejaxAnglesCuda},
                               {"musejax_embed_norm", MusejaxEmbedNormCuda},
                               {"musejax_layers", MusejaxLayersCuda},
                               {"musejax_layers_looped", MusejaxLayersLoopedCuda},
                               {"musejax_attn_in", MusejaxAttnInCuda},
                               {"musejax_attention", MusejaxAttentionCuda},
                               {"musejax_attn_out", MusejaxAttnOutCuda},
                               {"musejax_pool", MusejaxPoolCuda},
                               {"musejax_experts_up", MusejaxExpertsUpCuda},
                               {"musejax_experts_down", MusejaxExpertsDownCuda},
                               {"musejax_combine", MusejaxCombineCuda},
                               {"musejax_combine_partials", MusejaxCombinePartialsCuda},
                               {"musejax_combine_gathered", MusejaxCombineGatheredCuda},
                               {"musejax_unpool", MusejaxUnpoolCuda},
                               {"musejax_add_ffn", MusejaxAddFfnCuda},
                               {"musejax_head", MusejaxHeadCuda},
                               {"musejax_head_sums", MusejaxHeadSumsCuda},
                               {"musejax_logprob", MusejaxLogprobCuda},
                               {"musejax_softcap", MusejaxSoftcapCuda},
                               {"musejax_draft", MusejaxDraftCuda},
                               {"musejax_draft_looped", MusejaxDraftLoopedCuda},
                               {"musejax_draft_commit", MusejaxDraftCommitCuda},
                               {"musejax_draft_commit_looped", MusejaxDraftCommitLoopedCuda},
                               {"musejax_draft_tree", MusejaxDraftTreeCuda},
                           });
  // The sizes that musejax_layers is compiled for: (hidden, heads, kv_heads, head_dim, moe_hidden, moe_inner, experts,
  // top_k, slices), slices being those of one device.
  m.def("layer_instances", [] {
    nb::list out;
    for (const musejax::layer::Instance& i : musejax::layer::Instances())
      out.append(nb::make_tuple(i.hidden, i.heads, i.kv_heads, i.head_dim, i.moe_hidden, i.moe_inner, i.experts,
                                i.top_k, i.slices));
    return out;
  });
  // Which units of the dense GEMMs each SM runs, for launches of layer_instances()[instance] on GPUs of so many
  // multiprocessors; spans: [multiprocessors][5][2], flat, as musejax/kernels/schedule.py makes them.
  m.def("set_schedule", &musejax::layer::SetSchedule, nb::arg("instance"), nb::arg("multiprocessors"),
        nb::arg("spans"));
  // Makes GPUs, by their ordinals in the order of their ranks, ready for layer_instances()[instance] on all of them, for
  // caches of at most so many slots; before the first launch.
  m.def("connect", &musejax::layer::Connect, nb::arg("instance"), nb::arg("slots"), nb::arg("devices"));
  m.def("multiprocessors", &musejax::layer::Multiprocessors);  // of each GPU here
  // What a wait inside a layer kernel that did not end reported, empty if none did; and going on after it.
  m.def("layer_error", &musejax::comm::ErrorText);
  m.def("reset_after_error", [] {
    const int layers = int(musejax::layer::ResetAfterError()), draft = int(musejax::draft::ResetAfterError());
    const int flags = int(musejax::comm::ClearError());
    return layers ? layers : draft ? draft : flags;
  });
  // For tests: epochs of layer_instances()[instance] on a GPU that do not fit those of the others any more.
  m.def("shift_epochs", &musejax::layer::ShiftEpochs, nb::arg("instance"), nb::arg("device"), nb::arg("by"));
  m.def("layer_stamps", &musejax::layer::Stamps);  // [blocks][12 warps][64 layers][32 points], flat
  m.def(
      "set_spin_budget",
      [](uint64_t ns) {
        musejax::comm::SetSpinBudget(ns);
        const int layers = int(musejax::layer::WriteBudgets()), draft = int(musejax::draft::WriteBudgets());
        return layers ? layers : draft;
      },
      nb::arg("ns"));
  // Makes GPUs ready for drafters of these sizes, as `connect` does for layers.
  m.def(
      "connect_draft",
      [](int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t inner, int64_t taps,
         int64_t conv_groups, int64_t rank, int64_t vocab, int64_t candidates, int64_t slots,
         const std::vector<int>& devices) {
        musejax::DraftModel model{{hidden, heads, kv_heads, head_dim, inner, taps, conv_groups, rank}, vocab};
        model.candidates = candidates;
        musejax::draft::Connect(model, slots, devices);
      },
      nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("inner"), nb::arg("taps"),
      nb::arg("conv_groups"), nb::arg("rank"), nb::arg("vocab"), nb::arg("candidates"), nb::arg("slots"),
      nb::arg("devices"));
  m.def("limits", &Limits, nb::arg("device"), nb::arg("groups"));
}
