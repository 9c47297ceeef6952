/* Memory of a device, accounted by purpose. */
#include "core/device.h"

static const char *const memory_names[MT_MEMORY_COUNT] = {
    [MT_MEMORY_MASTER] = "master weights",     [MT_MEMORY_GRAD] = "gradients",
    [MT_MEMORY_MOMENTS] = "optimizer moments", [MT_MEMORY_COMPUTE] = "compute weights",
    [MT_MEMORY_ACTIVATIONS] = "activations",   [MT_MEMORY_HOST_POOL] = "host pool",
    [MT_MEMORY_WORKSPACE] = "workspace",       [MT_MEMORY_STATE] = "state",
};

const char *mt_memory_name(mt_memory memory)
{
    return (unsigned)memory < MT_MEMORY_COUNT ? memory_names[memory] : "unknown memory";
}

mt_status mt_device_alloc(mt_device *device, void **p, size_t bytes, mt_memory memory)
{
    *p = NULL;
    MT_REQUIRE((unsigned)memory < MT_MEMORY_COUNT, MT_EINVAL, "memory purpose %d is not known",
               (int)memory);
    if (bytes == 0) return MT_OK;
    mt_status status = bytes > PTRDIFF_MAX
                           ? MT_ENOMEM
                           : device->ops->alloc(device, p, bytes, memory == MT_MEMORY_HOST_POOL);
    if (status == MT_ENOMEM)
        return MT_FAIL(MT_ENOMEM, "device %s: no %zu bytes for %s (%lld bytes of it in use)",
                       device->name, bytes, mt_memory_name(memory),
                       (long long)device->bytes[memory]);
    MT_TRY(status);
    device->bytes[memory] += (int64_t)bytes;
    if (device->bytes[memory] > device->peak[memory]) device->peak[memory] = device->bytes[memory];
    return MT_OK;
}

void mt_device_free(mt_device *device, void **p, size_t bytes, mt_memory memory)
{
    if (!*p) return;
    device->ops->release(device, *p, bytes, memory == MT_MEMORY_HOST_POOL);
    device->bytes[memory] -= (int64_t)bytes;
    device->frees++;
    *p = NULL;
}

mt_status mt_device_copy(mt_device *device, void *to, const void *from, size_t bytes)
{
    if (bytes == 0) return MT_OK;
    MT_REQUIRE(to && from, MT_EINVAL, "device %s: copy of %zu bytes %s NULL", device->name, bytes,
               to ? "from" : "to");
    return device->ops->copy(device, to, from, bytes);
}

mt_status mt_device_zero(mt_device *device, void *p, size_t bytes)
{
    if (bytes == 0) return MT_OK;
    MT_REQUIRE(p, MT_EINVAL, "device %s: %zu bytes at NULL to zero", device->name, bytes);
    return device->ops->zero(device, p, bytes);
}

mt_status mt_device_copy_async(mt_stream *stream, void *to, const void *from, size_t bytes)
{
    mt_device *device = stream->device;
    if (bytes == 0 || !device->ops->copy_async) return mt_device_copy(device, to, from, bytes);
    MT_REQUIRE(to && from, MT_EINVAL, "device %s: copy of %zu bytes %s NULL", device->name, bytes,
               to ? "from" : "to");
    return device->ops->copy_async(stream, to, from, bytes);
}

mt_status mt_device_zero_async(mt_stream *stream, void *p, size_t bytes)
{
    mt_device *device = stream->device;
    if (bytes == 0 || !device->ops->zero_async) return mt_device_zero(device, p, bytes);
    MT_REQUIRE(p, MT_EINVAL, "device %s: %zu bytes at NULL to zero", device->name, bytes);
    return device->ops->zero_async(stream, p, bytes);
}

mt_status mt_device_copy_lines(mt_stream *stream, const struct mt_copy_lines *lines)
{
    struct mt_copy_lines c = *lines;
    mt_device *device = stream->device;
    if (c.bytes == 0 || c.lines <= 0) return MT_OK;
    MT_REQUIRE(c.to && c.from, MT_EINVAL, "device %s: copy of %lld lines %s NULL", device->name,
               (long long)c.lines, c.to ? "from" : "to");
    MT_REQUIRE(c.lines == 1 || (c.to_pitch >= c.bytes && c.from_pitch >= c.bytes), MT_EINVAL,
               "device %s: lines of %zu bytes, %zu and %zu apart", device->name, c.bytes,
               c.to_pitch, c.from_pitch);
    if (c.to_pitch == c.bytes && c.from_pitch == c.bytes) c.bytes *= (size_t)c.lines, c.lines = 1;
    if (c.lines > 1 && device->ops->copy_lines) return device->ops->copy_lines(stream, &c);
    for (int64_t i = 0; i < c.lines; i++)
        MT_TRY(mt_device_copy_async(stream, (char *)c.to + (size_t)i * c.to_pitch,
                                    (const char *)c.from + (size_t)i * c.from_pitch, c.bytes));
    return MT_OK;
}

mt_status mt_stream_create(mt_stream *stream, mt_device *device)
{
    *stream = (mt_stream){ .device = device };
    return device->ops->stream_create ? device->ops->stream_create(device, &stream->impl) : MT_OK;
}

void mt_stream_destroy(mt_stream *stream)
{
    if (stream->impl) stream->device->ops->stream_destroy(stream->device, stream->impl);
    *stream = (mt_stream){ 0 };
}

mt_status mt_stream_synchronize(mt_stream *stream)
{
    const struct mt_device_ops *ops = stream->device->ops;
    return ops->stream_synchronize ? ops->stream_synchronize(stream) : MT_OK;
}

mt_status mt_event_create(mt_event *event, mt_device *device)
{
    *event = (mt_event){ .device = device };
    return device->ops->event_create ? device->ops->event_create(device, &event->impl) : MT_OK;
}

void mt_event_destroy(mt_event *event)
{
    if (event->impl) event->device->ops->event_destroy(event->device, event->impl);
    *event = (mt_event){ 0 };
}

mt_status mt_event_record(mt_event *event, mt_stream *stream)
{
    return event->impl ? event->device->ops->event_record(stream, event->impl) : MT_OK;
}

mt_status mt_event_wait(const mt_event *event, mt_stream *stream)
{
    return event->impl ? event->device->ops->event_wait(stream, event->impl) : MT_OK;
}

mt_status mt_event_done(const mt_event *event, bool *done)
{
    *done = true;
    return event->impl ? event->device->ops->event_done(event->device, event->impl, done) : MT_OK;
}

bool mt_device_records(const mt_device *device)
{
    return device->ops->graph_begin != NULL;
}

mt_status mt_graph_begin(mt_device *device)
{
    MT_REQUIRE(mt_device_records(device), MT_EUNSUPPORTED,
               "device %s records no graphs with kernel set %s", device->name, device->kernel_set);
    return device->ops->graph_begin(device);
}

mt_status mt_graph_end(mt_graph *graph, mt_device *device, bool keep)
{
    *graph = (mt_graph){ NULL, NULL };
    MT_TRY(device->ops->graph_end(device, &graph->impl, keep));
    if (keep) graph->device = device;
    return MT_OK;
}

mt_status mt_graph_launch(const mt_graph *graph)
{
    MT_REQUIRE(graph->device, MT_EINVAL, "no graph to launch");
    return graph->device->ops->graph_launch(graph->device, graph->impl);
}

void mt_graph_destroy(mt_graph *graph)
{
    if (graph->device) graph->device->ops->graph_destroy(graph->device, graph->impl);
    *graph = (mt_graph){ NULL, NULL };
}

mt_status mt_device_synchronize(mt_device *device)
{
    return device->ops->synchronize(device);
}

mt_status mt_timer_create(mt_timer *timer, mt_device *device)
{
    *timer = (mt_timer){ .device = device };
    return device->ops->timer_create(device, &timer->impl);
}

void mt_timer_destroy(mt_timer *timer)
{
    if (timer->impl) timer->device->ops->timer_destroy(timer->device, timer->impl);
    *timer = (mt_timer){ 0 };
}

mt_status mt_timer_start(mt_timer *timer, mt_stream *stream)
{
    return timer->device->ops->timer_mark(stream, timer->impl, false);
}

mt_status mt_timer_stop(mt_timer *timer, mt_stream *stream)
{
    return timer->device->ops->timer_mark(stream, timer->impl, true);
}

mt_status mt_timer_read(mt_timer *timer, double *seconds)
{
    return timer->device->ops->timer_read(timer->device, timer->impl, seconds);
}

void mt_device_destroy(mt_device **device)
{
    if (!*device) return;
    (*device)->ops->destroy(*device);
    *device = NULL;
}
