// For machines of any kind. See setup.py for why its name comes before those of the wide ones.
#define KERNELS_OF portable
#include "vec_portable.h"
#include "kernels.inl"
