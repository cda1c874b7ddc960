/* Words about ranks in messages, alike for every engine. */
#ifndef MUI_NAMING_H
#define MUI_NAMING_H

#include "base/beacon.h"

/* Appends text, after `between` when something is there already; what does not fit is cut off. */
void mui_join(char *out, size_t size, size_t *used, const char *between, const char *text);
/* "step 12 of epoch 3, reduction 200 (ddp `net`), backward, layer3.2.conv2"; "" when nothing is known. */
void mui_place_text(const mui_board *phase, const mui_beacon *beacon, char *out, size_t size);

#endif
