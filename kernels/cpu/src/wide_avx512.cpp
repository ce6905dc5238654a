#include "kernels.h"
#ifdef HEADRACE_HAS_WIDE
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")
#define KERNELS_OF avx512
#include "vec_avx512.h"
#include "kernels.inl"
#endif
