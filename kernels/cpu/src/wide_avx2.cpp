#include "kernels.h"
#ifdef HEADRACE_HAS_WIDE
#pragma GCC target("avx2,fma,f16c,bmi2")
#define KERNELS_OF avx2
#include "vec_portable.h"
#include "kernels.inl"
#endif
