/* What this program was built from, baked in by the Makefile. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* "0.1" */
const char *mt_build_version(void);
/* "1a2b3c4d5e6f", with "+" when files differed from it, or "unknown" outside a git tree. */
const char *mt_build_revision(void);
/* "hdf5 1.10.8, openblas 0.3.21, ..." */
const char *mt_build_libraries(void);
/* "gcc 12.2.0" */
const char *mt_build_compiler(void);

#ifdef __cplusplus
}
#endif
