// The drafter's kernels in plain C++.
#include "cpu/draft_kernels_impl.h"
