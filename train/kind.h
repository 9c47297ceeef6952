/* What a path leads to: for the errors of those who wanted something else. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* In order: what tells nothing, directories, files. */
typedef enum mt_path_kind {
    MT_KIND_NOTHING,    /* it is not there */
    MT_KIND_UNREADABLE, /* mt_file_check_readable says why */
    MT_KIND_DEVICE,     /* or a pipe, or a socket */
    MT_KIND_DIRECTORY,
    MT_KIND_RUN,
    MT_KIND_CHECKPOINT,
    MT_KIND_HUGGING_FACE,
    MT_KIND_EMPTY, /* a file, as all from here on are */
    MT_KIND_TEXT,
    MT_KIND_HDF5,
    MT_KIND_SAFETENSORS,
    MT_KIND_NUMPY,
    MT_KIND_ZIP,
    MT_KIND_GGUF,
    MT_KIND_GZIP,
    MT_KIND_OTHER,
    MT_KIND_COUNT
} mt_path_kind;

/* Directories by the files that such ones have, files by their first bytes. */
mt_path_kind mt_path_kind_find(const char *path);
/* "a checkpoint", "a text", ... Static. */
const char *mt_path_kind_name(mt_path_kind kind);
/* Both. */
const char *mt_path_kind_of(const char *path);

#ifdef __cplusplus
}
#endif
