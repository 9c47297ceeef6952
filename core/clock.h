/* The clock that only goes forward. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* Seconds since some moment. */
double mt_now(void);
/* Sleeps for so many seconds, or until a signal comes. */
void mt_nap(double seconds);

#ifdef __cplusplus
}
#endif
