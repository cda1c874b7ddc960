/* Words about ranks in messages. */
#include "comm/naming.h"

#include <stdio.h>

void mui_join(char *out, size_t size, size_t *used, const char *between, const char *text)
{
    if (text[0] != '\0' && *used + 1 < size) {
        int n = snprintf(out + *used, size - *used, "%s%s", *used > 0 ? between : "", text);
        *used += n > 0 ? (size_t)n : 0;
        *used = *used < size ? *used : size - 1;
    }
}

void mui_place_text(const mui_board *phase, const mui_beacon *beacon, char *out, size_t size)
{
    char text[MUI_BOARD_BYTES] = "";
    size_t used = 0;
    uint32_t stage = 0;
    out[0] = '\0';
    mui_board_read(phase, NULL, text);
    mui_join(out, size, &used, "", text);
    mui_board_read(&beacon->work, NULL, text);
    mui_join(out, size, &used, ", ", text);
    mui_board_read(&beacon->place, &stage, text);
    mui_join(out, size, &used, ", ", mui_stage_name(stage));
    mui_join(out, size, &used, ", ", text);
}
