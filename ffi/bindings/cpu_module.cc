// Python module musejax._cpu: the CPU handlers under the target names that both platforms share, the packed layout, and
// what of the twin can be chosen: threads and instruction set, neither of which changes a bit.
#include <nanobind/stl/string.h>

#include "bindings/layout.h"
#include "bindings/module.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

extern "C" {
musejax::Handler MusejaxBuildInfoCpu, MusejaxLayersCpu, MusejaxAnglesCpu, MusejaxEmbedNormCpu, MusejaxAttnInCpu,
    MusejaxAttentionCpu, MusejaxAttnOutCpu, MusejaxPoolCpu, MusejaxExpertsUpCpu, MusejaxExpertsDownCpu,
    MusejaxCombineCpu, MusejaxCombinePartialsCpu, MusejaxCombineGatheredCpu, MusejaxUnpoolCpu, MusejaxAddFfnCpu,
    MusejaxHeadCpu, MusejaxHeadSumsCpu, MusejaxLogprobCpu, MusejaxSoftcapCpu, MusejaxDraftCpu, MusejaxDraftCommitCpu,
    MusejaxDraftTreeCpu, MusejaxDraftFcCpu, MusejaxDraftContextCpu, MusejaxDraftEmbedCpu, MusejaxDraftDeltaCpu,
    MusejaxDraftAttentionCpu, MusejaxDraftAttnOutCpu, MusejaxDraftUpCpu, MusejaxDraftDownCpu, MusejaxDraftHeadCpu,
    MusejaxDraftLatticeCpu;
}

NB_MODULE(_cpu, m) {
  musejax::DefineModule(m, {
                               {"musejax_build_info", MusejaxBuildInfoCpu},
                               {"musejax_layers", MusejaxLayersCpu},
                               {"musejax_angles", MusejaxAnglesCpu},
                               {"musejax_embed_norm", MusejaxEmbedNormCpu},
                               {"musejax_attn_in", MusejaxAttnInCpu},
                               {"musejax_attention", MusejaxAttentionCpu},
                               {"musejax_attn_out", MusejaxAttnOutCpu},
                               {"musejax_pool", MusejaxPoolCpu},
                               {"musejax_experts_up", MusejaxExpertsUpCpu},
                               {"musejax_experts_down", MusejaxExpertsDownCpu},
                               {"musejax_combine", MusejaxCombineCpu},
                               {"musejax_combine_partials", MusejaxCombinePartialsCpu},
                               {"musejax_combine_gathered", MusejaxCombineGatheredCpu},
                               {"musejax_unpool", MusejaxUnpoolCpu},
                               {"musejax_add_ffn", MusejaxAddFfnCpu},
                               {"musejax_head", MusejaxHeadCpu},
                               {"musejax_head_sums", MusejaxHeadSumsCpu},
                               {"musejax_logprob", MusejaxLogprobCpu},
                               {"musejax_softcap", MusejaxSoftcapCpu},
                               {"musejax_draft", MusejaxDraftCpu},
                               {"musejax_draft_commit", MusejaxDraftCommitCpu},
                               {"musejax_draft_tree", MusejaxDraftTreeCpu},
                               {"musejax_draft_fc", MusejaxDraftFcCpu},
                               {"musejax_draft_context", MusejaxDraftContextCpu},
                               {"musejax_draft_embed", MusejaxDraftEmbedCpu},
                               {"musejax_draft_delta", MusejaxDraftDeltaCpu},
                               {"musejax_draft_attention", MusejaxDraftAttentionCpu},
                               {"musejax_draft_attn_out", MusejaxDraftAttnOutCpu},
                               {"musejax_draft_up", MusejaxDraftUpCpu},
                               {"musejax_draft_down", MusejaxDraftDownCpu},
                               {"musejax_draft_head", MusejaxDraftHeadCpu},
                               {"musejax_draft_lattice", MusejaxDraftLatticeCpu},
                           });
  musejax::DefineLayout(m);
  musejax::DefineDraftLayout(m);
  m.def("set_threads", &musejax::SetThreads, nanobind::arg("n"));
  m.def("threads", &musejax::Threads);
  m.def("set_isa", [](const std::string& name) { return musejax::SelectKernels(name); }, nanobind::arg("name"));
  m.def("isa", [] { return nanobind::str(musejax::ActiveKernels().name); });
}
