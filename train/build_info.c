/* Compiled again whenever the revision changes. */
#include "train/build_info.h"

#ifndef MT_BUILD_VERSION
#define MT_BUILD_VERSION "unknown"
#endif
#ifndef MT_BUILD_REVISION
#define MT_BUILD_REVISION "unknown"
#endif
#ifndef MT_BUILD_LIBRARIES
#define MT_BUILD_LIBRARIES "unknown"
#endif

const char *mt_build_version(void)
{
    return MT_BUILD_VERSION;
}

const char *mt_build_revision(void)
{
    return MT_BUILD_REVISION;
}

const char *mt_build_libraries(void)
{
    return MT_BUILD_LIBRARIES;
}

const char *mt_build_compiler(void)
{
#ifdef __clang__
    return __VERSION__;
#else
    return "gcc " __VERSION__;
#endif
}
