/* Dispatch of the op table. */
#include "kernels/ops.h"

#include "kernels/check.h"

mt_status mt_device_kernels(const mt_device *device, mt_dtype dtype,
                            const struct mt_kernels **kernels)
{
    *kernels = (unsigned)dtype < MT_DTYPE_COUNT ? device->kernels[dtype] : NULL;
    MT_REQUIRE(*kernels, MT_EUNSUPPORTED, "device %s has no kernels for %s", device->name,
               mt_dtype_name(dtype));
    return MT_OK;
}

#define MT_OP_DISPATCH(op)                                                                         \
    mt_status mt_##op(mt_stream *stream, const struct mt_##op##_args *args)                        \
    {                                                                                              \
        const struct mt_kernels *kernels;                                                          \
        MT_TRY(mt_device_kernels(stream->device, args->dtype, &kernels));                          \
        MT_REQUIRE(kernels->op, MT_EUNSUPPORTED, "%s: no %s kernel on device %s", #op,             \
                   mt_dtype_name(args->dtype), stream->device->name);                              \
        MT_TRY(mt_##op##_check(args));                                                             \
        return kernels->op(stream, args);                                                          \
    }
MT_OPS(MT_OP_DISPATCH)
