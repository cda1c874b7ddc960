/* What `muster plan` is told: a network, and the report of a run. Both return -1 to go on, else the exit code after a
 * message. */
#ifndef MUSTER_CLI_PLAN_READ_H
#define MUSTER_CLI_PLAN_READ_H

#include "plan_model.h"

/* "25gbe", "gbit=25,latency_us=10", "ib200,overhead_us=0.5" */
int plan_read_network(const char *spec, plan_network *out);
/* The JSON of docs/report.md. s->parameter is the caller's to free, also on failure. */
int plan_read_report(const char *path, plan_step *s);
/* Other times than those recorded, where they are not below 0. */
void plan_scale(plan_step *s, double forward, double backward);

#endif
