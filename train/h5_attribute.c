/* HDF5 attributes: strings and numbers. */
#define H5_USE_110_API 1
#include <hdf5.h>
#include <stdlib.h>
#include <string.h>

#include "train/h5_priv.h"

enum { MAX_TEXT = 1 << 24 };

mt_status mt_h5_has_attribute(mt_h5 *file, const char *object, const char *name, bool *has)
{
    MT_TRY(mt_h5_check_path(file, object));
    htri_t there = H5Aexists_by_name(file->id, object, name, H5P_DEFAULT);
    MT_TRY(mt_h5_check(file, object, "look up an attribute", there));
    *has = there > 0;
    return MT_OK;
}

/* ---- writing -----------------------------------------------------------------------------------
 */

static mt_status set_attribute(mt_h5 *file, const char *object, const char *name, hid_t type,
                               hid_t memory_type, const void *data)
{
    mt_status status = MT_OK;
    hid_t attribute = -1, space = H5Screate(H5S_SCALAR);
    MT_H5(file, object, "make a shape", space);
    attribute = H5Acreate_by_name(file->id, object, name, type, space, H5P_DEFAULT, H5P_DEFAULT,
                                  H5P_DEFAULT);
    MT_H5(file, object, name, attribute);
    MT_H5(file, object, name, H5Awrite(attribute, memory_type, data));
cleanup:
    if (attribute >= 0) H5Aclose(attribute);
    if (space >= 0) H5Sclose(space);
    return status;
}

/* Fixed-length: it lies in the object's header, which has a checksum; variable-length text would
 * not. */
mt_status mt_h5_set_string(mt_h5 *file, const char *object, const char *name, const char *text)
{
    mt_status status = MT_OK;
    hid_t type = H5Tcopy(H5T_C_S1);
    MT_H5(file, object, name, type);
    MT_H5(file, object, name, H5Tset_size(type, strlen(text) + 1));
    MT_H5(file, object, name, H5Tset_cset(type, H5T_CSET_UTF8));
    MT_TRY_CLEANUP(set_attribute(file, object, name, type, type, text));
cleanup:
    if (type >= 0) H5Tclose(type);
    return status;
}

mt_status mt_h5_set_i64(mt_h5 *file, const char *object, const char *name, int64_t x)
{
    return set_attribute(file, object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &x);
}

mt_status mt_h5_set_u64(mt_h5 *file, const char *object, const char *name, uint64_t x)
{
    return set_attribute(file, object, name, H5T_STD_U64LE, H5T_NATIVE_UINT64, &x);
}

mt_status mt_h5_set_f64(mt_h5 *file, const char *object, const char *name, double x)
{
    return set_attribute(file, object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &x);
}

/* ---- reading -----------------------------------------------------------------------------------
 */

typedef struct opened {
    hid_t id, type;
    H5T_class_t class;
} opened;

static void close_attribute(opened *a)
{
    if (a->type >= 0) H5Tclose(a->type);
    if (a->id >= 0) H5Aclose(a->id);
}

/* Opens an attribute of one element. */
static mt_status open_attribute(opened *a, mt_h5 *file, const char *object, const char *name)
{
    bool has = false;
    mt_status status;
    hid_t space = -1;
    *a = (opened){ -1, -1, H5T_NO_CLASS };
    MT_TRY_CLEANUP(mt_h5_has_attribute(file, object, name, &has));
    if (!has) {
        status = MT_H5_DAMAGED(file, object, "has no attribute '%s'", name);
        goto cleanup;
    }
    a->id = H5Aopen_by_name(file->id, object, name, H5P_DEFAULT, H5P_DEFAULT);
    MT_H5(file, object, name, a->id);
    MT_H5(file, object, name, a->type = H5Aget_type(a->id));
    MT_H5(file, object, name, space = H5Aget_space(a->id));
    a->class = H5Tget_class(a->type);
    if (H5Sget_simple_extent_npoints(space) != 1)
        status = MT_H5_DAMAGED(file, object, "attribute '%s' is not one value", name);
cleanup:
    if (space >= 0) H5Sclose(space);
    if (status != MT_OK) close_attribute(a);
    return status;
}

/* *text is allocated even on failure. */
static mt_status read_fixed(mt_h5 *file, const char *object, const char *name, const opened *a,
                            char **text)
{
    size_t bytes = H5Tget_size(a->type);
    if (bytes > MAX_TEXT)
        return MT_H5_DAMAGED(file, object, "attribute '%s' has %zu bytes, more than %d", name,
                             bytes, MAX_TEXT);
    *text = calloc(1, bytes + 1);
    MT_REQUIRE(*text, MT_ENOMEM, "no memory for attribute '%s' (%zu bytes)", name, bytes);
    MT_TRY(mt_h5_check(file, object, name, H5Aread(a->id, a->type, *text)));
    if (H5Tget_strpad(a->type) == H5T_STR_SPACEPAD)
        while (bytes && (*text)[bytes - 1] == ' ') (*text)[--bytes] = '\0';
    return MT_OK;
}

static mt_status read_variable(mt_h5 *file, const char *object, const char *name, const opened *a,
                               char **text)
{
    char *theirs = NULL;
    MT_TRY(mt_h5_check(file, object, name, H5Aread(a->id, a->type, &theirs)));
    size_t bytes = theirs ? strlen(theirs) : 0;
    mt_status status = MT_OK;
    if (bytes > MAX_TEXT)
        status = MT_H5_DAMAGED(file, object, "attribute '%s' has %zu bytes, more than %d", name,
                               bytes, MAX_TEXT);
    else if (!(*text = strdup(theirs ? theirs : "")))
        status = MT_FAIL(MT_ENOMEM, "no memory for attribute '%s' (%zu bytes)", name, bytes);
    H5free_memory(theirs);
    return status;
}

mt_status mt_h5_get_string(mt_h5 *file, const char *object, const char *name, char **text)
{
    opened a;
    *text = NULL;
    MT_TRY(open_attribute(&a, file, object, name));
    mt_status status;
    if (a.class != H5T_STRING)
        status = MT_H5_DAMAGED(file, object, "attribute '%s' is not a string", name);
    else
        status = (H5Tis_variable_str(a.type) > 0 ? read_variable : read_fixed)(file, object, name,
                                                                               &a, text);
    close_attribute(&a);
    if (status == MT_OK) return MT_OK;
    free(*text);
    *text = NULL;
    return mt_error_pass(status, __FILE__, __LINE__);
}

/* An integer as sign and magnitude bits: *negative tells how to read *x. */
static mt_status get_integer(mt_h5 *file, const char *object, const char *name, uint64_t *x,
                             bool *negative)
{
    opened a;
    MT_TRY(open_attribute(&a, file, object, name));
    mt_status status = MT_OK;
    bool is_signed = H5Tget_sign(a.type) == H5T_SGN_2;
    if (a.class != H5T_INTEGER || H5Tget_size(a.type) > 8)
        status = MT_H5_DAMAGED(file, object, "attribute '%s' is not an integer", name);
    else
        status = mt_h5_check(file, object, name,
                             H5Aread(a.id, is_signed ? H5T_NATIVE_INT64 : H5T_NATIVE_UINT64, x));
    close_attribute(&a);
    if (status == MT_OK) *negative = is_signed && *x >> 63;
    return status;
}

mt_status mt_h5_get_i64(mt_h5 *file, const char *object, const char *name, int64_t *x)
{
    uint64_t bits;
    bool negative = false;
    MT_TRY(get_integer(file, object, name, &bits, &negative));
    if (!negative && bits > INT64_MAX)
        return MT_H5_DAMAGED(file, object, "attribute '%s' = %llu is too large", name,
                             (unsigned long long)bits);
    memcpy(x, &bits, sizeof *x);
    return MT_OK;
}

mt_status mt_h5_get_u64(mt_h5 *file, const char *object, const char *name, uint64_t *x)
{
    bool negative = false;
    MT_TRY(get_integer(file, object, name, x, &negative));
    if (negative) return MT_H5_DAMAGED(file, object, "attribute '%s' is negative", name);
    return MT_OK;
}

mt_status mt_h5_get_f64(mt_h5 *file, const char *object, const char *name, double *x)
{
    opened a;
    MT_TRY(open_attribute(&a, file, object, name));
    mt_status status;
    if (a.class != H5T_FLOAT)
        status = MT_H5_DAMAGED(file, object, "attribute '%s' is not a float", name);
    else
        status = mt_h5_check(file, object, name, H5Aread(a.id, H5T_NATIVE_DOUBLE, x));
    close_attribute(&a);
    return status;
}
