/* Hosts: which one this is, and connections to another within a time, whatever resolvers and
 * networks do. */
#pragma once

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_HOST_TEXT = 72, MT_HOST_ADDRESS = 352 };

/* A host: names may be given twice, `boot` differs between machines, and from one start of a
 * machine to the next. "": the system does not say. */
typedef struct mt_host {
    char name[MT_HOST_TEXT], boot[MT_HOST_TEXT];
} mt_host;

/* This one. */
void mt_host_here(mt_host *host);

/* "name:port@boot", where a listener of this host is found under that name; NULL: under its own. */
void mt_host_address(char address[MT_HOST_ADDRESS], const char *name, int port);

/* One attempt to connect to "name:port", or to what mt_host_address has written: then this host's
 * own name means this host, by its loopback. Takes at most so many seconds, or 0.1 where that is
 * less. Errors, which say why and leave it to the caller to say to whom: MT_EDEVICE, also when the
 * time is over, with what was waited for; MT_ECONFIG, another host has the name of this one;
 * MT_ENOMEM. */
mt_status mt_host_connect(int *connection, const char *address, double seconds);

#ifdef __cplusplus
}
#endif
