/* kvtier: everything but the engine adapters. */
#ifndef KVTIER_KVTIER_H
#define KVTIER_KVTIER_H

#include <kvtier/cache.h>
#include <kvtier/codec.h>
#include <kvtier/config.h>
#include <kvtier/error.h>
#include <kvtier/key.h>
#include <kvtier/layout.h>
#include <kvtier/session.h>
#include <kvtier/version.h>

#endif
