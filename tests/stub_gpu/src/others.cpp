// cuSPARSE, cuSOLVER, cuFFT and NVRTC: the handles that torch makes. Compiled once for each, with its name defined.
#include <cstdlib>

#include "core.h"

#ifdef LIBRARY_cusparse
API int cusparseCreate(void** out) {
  *out = calloc(1, 64);
  return 0;
}
#endif

#ifdef LIBRARY_cusolver
API int cusolverDnCreate(void** out) {
  *out = calloc(1, 64);
  return 0;
}
#endif

#ifdef LIBRARY_cufft
API int cufftCreate(int* out) {
  *out = 1;
  return 0;
}
#endif

#ifdef LIBRARY_nvrtc
API int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
API const char* nvrtcGetErrorString(int) { return "stub NVRTC"; }
#endif
