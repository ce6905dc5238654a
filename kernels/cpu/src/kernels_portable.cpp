// For machines of any kind; must come before the others when linked (see setup.py).
#define KERNELS_OF portable
#include "vec_portable.h"
#include "kernels.inl"
