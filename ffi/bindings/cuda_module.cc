// Python module musejax._cuda: the CUDA handlers under the target names that both platforms share.
#include "bindings/module.h"

extern "C" {
musejax::Handler MusejaxBuildInfoCuda;
}

NB_MODULE(_cuda, m) {
  musejax::DefineModule(m, {
                               {"musejax_build_info", MusejaxBuildInfoCuda},
                           });
}
