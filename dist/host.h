/* Hosts: which one this is, and connections to another within a time, whatever resolvers and
 * networks do. */
#pragma once

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_HOST_TEXT = 72, MT_HOST_NAME = 256, MT_HOST_ADDRESS = 352 };

/* A host: names may be given twice, `boot` differs between machines, and from one start of a
 * machine to the next. "": the system does not say. */
typedef struct mt_host {
    char name[MT_HOST_TEXT], boot[MT_HOST_TEXT];
} mt_host;

/* This one. */
void mt_host_here(mt_host *host);

/* "name:port@boot", where a listener is found, or "name:port" (boot NULL: it is not known): a name
 * with a ':' in it, an address of IPv6, stands in brackets. */
void mt_host_address(char address[MT_HOST_ADDRESS], const char *name, int port, const char *boot);
/* Its parts; *boot within it. MT_EDEVICE, it is not one. */
mt_status mt_host_parts(char name[MT_HOST_NAME], int *port, const char **boot, const char *address);

/* Listens at *port, 0: one that is free, of all addresses that this host has, of IPv6 and IPv4;
 * where `name` is a loopback address or "localhost", of that alone: only this host is to come. What
 * other names mean to whom is not known here: the same one may be a loopback address on this host
 * alone. MT_EDEVICE says why not. */
mt_status mt_host_listen(int *listener, int *port, const char *name);

/* One attempt to connect to an address, in turns to all that its name means: each gets two seconds
 * at most, so that one that never answers leaves time for the next attempt, at another, or where
 * rank 0 is said to be by then. With a boot, this host's own name means this host, by its loopback.
 * Takes at most so many seconds, or 0.1 where that is less. Errors, which say why and leave it to
 * the caller to say to whom: MT_EDEVICE, also when the time is over, with what was waited for;
 * MT_ECONFIG, another host has the name of this one; MT_ENOMEM. */
mt_status mt_host_connect(int *connection, const char *address, double seconds);

#ifdef __cplusplus
}
#endif
