/* Everything. */
#ifndef MUSTER_MUSTER_H
#define MUSTER_MUSTER_H

#include <muster/base.h>
#include <muster/checkpoint.h>
#include <muster/data.h>
#include <muster/data_parallel.h>
#include <muster/ddp.h>
#include <muster/group.h>
#include <muster/hooks.h>
#include <muster/layers.h>
#include <muster/module.h>
#include <muster/ops.h>
#include <muster/optim.h>
#include <muster/profile.h>
#include <muster/reducer.h>
#include <muster/tape.h>
#include <muster/tensor.h>
#include <muster/trace.h>

#endif
