// Python module musejax._cpu: the CPU handlers under the target names that both platforms share.
#include "bindings/module.h"

extern "C" {
musejax::Handler MusejaxBuildInfoCpu;
}

NB_MODULE(_cpu, m) {
  musejax::DefineModule(m, {
                               {"musejax_build_info", MusejaxBuildInfoCpu},
                           });
}
