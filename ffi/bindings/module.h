// The Python face of a platform library, the same for both: targets(), version(), abi(). Handlers
// leave as capsules and musejax/ffi.py registers them; nothing registers itself when loaded.
#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <string>

#include "common/version.h"
#include "xla/ffi/api/c_api.h"

namespace musejax {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);
using Targets = std::map<std::string, Handler*>;  // FFI target name -> execute handler

inline void DefineModule(nanobind::module_& m, Targets targets) {
  namespace nb = nanobind;
  m.def("version", [] { return nb::str(kVersion); });
  m.def("abi", [] { return kAbi; });
  m.def("targets", [targets = std::move(targets)] {
    nb::dict capsules;
    for (const auto& [name, handler] : targets)
      capsules[name.c_str()] = nb::capsule(reinterpret_cast<void*>(handler));
    return capsules;
  });
}

}  // namespace musejax
