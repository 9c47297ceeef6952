/* SIGTERM, SIGUSR1 and SIGINT as a request to stop: the first is remembered, a second quits at
 * once. Until a run asks for that, SIGTERM, SIGINT and SIGHUP end the process as ever, but without
 * what it has begun to write. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* From here on a signal that ends the process removes the files that it has begun, and directories
 * of them; one that is ignored stays so. */
void mt_signals_clean_up(void);
/* The file or directory of this name, this process's own, is such a one until it has another. */
void mt_signals_begun(const char *path);

/* From here on the signals are requests. A write to a pipe that nobody reads any more fails, as one
 * to a full disk does, and ends nothing by itself (SIGPIPE). */
void mt_signals_install(void);
/* The signal that asked to stop, or 0. */
int mt_signals_pending(void);
/* "SIGTERM" */
const char *mt_signals_name(int signal_number);

#ifdef __cplusplus
}
#endif
