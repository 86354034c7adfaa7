/* The parsed values of a configuration: what kvt_open() runs with. kvtier/config.h is the public
 * face; the table of keys, types, defaults and limits is in options.c, and nowhere else.
 */
#ifndef KVT_CLIENT_SETTINGS_H
#define KVT_CLIENT_SETTINGS_H

#include <stdint.h>

#include "format/ns_rules.h"
#include "kvtier/config.h"

#define KVT_DISKS_MAX 16u
#define KVT_EXCLUDES_MAX 32u
#define KVT_LAYER_LAST UINT32_MAX /* the layout's highest layer */
#define KVT_AUTO UINT64_MAX       /* a size or count that kvt_settings_resolve() fills in */

enum kvt_plan_setting { KVT_PLAN_SET_OFF = 0, KVT_PLAN_SET_ON, KVT_PLAN_SET_DETERMINISTIC };

enum kvt_pin_setting { KVT_PIN_SET_OFF = 0, KVT_PIN_SET_AUTO, KVT_PIN_SET_REQUIRED };

#define KVT_GDS_FILES 16u /* segments kept open for direct loads */

struct kvt_io;
struct kvt_pin_ops;

struct kvt_disk_setting {
    char *path; /* owned */
    uint64_t cap_bytes;
};

struct kvt_settings {
    uint64_t dram; /* bytes of the arena, staging included; 0: staging only */
    uint64_t staging;
    uint64_t write_queue;
    uint64_t pin_max;
    uint64_t threads;
    uint64_t io_threads;
    uint64_t requests_max;
    uint64_t request_blocks_max;
    uint64_t gpu_ctas, gpu_store_ctas;
    uint64_t gpu_wave;    /* bytes of one launch */
    uint64_t fds_max;     /* descriptors of a cache */
    uint64_t scrub;       /* bytes a second; KVT_AUTO: off */
    uint64_t gpu_pace;    /* record bytes a second; KVT_AUTO: as fast as it goes */
    uint64_t numa_node;   /* KVT_AUTO: wherever */
    uint64_t numa_device; /* KVT_AUTO: none */
    uint64_t dram_share;  /* per cent; KVT_AUTO: dram says it */
    uint64_t ranks;
    int huge_pages;         /* -1 auto, 0 off, 1 required */
    uint64_t load_deadline; /* ns; KVT_AUTO: none */
    uint64_t plan_lambda;   /* per cent */
    uint64_t plan_prefill;  /* tokens a second, of short prompts */
    uint64_t plan_disk;     /* bytes a second */
    uint64_t plan_dram;     /* bytes a second */
    uint64_t ttl;           /* ns; KVT_AUTO: for ever */
    uint64_t ns_quota;      /* bytes; KVT_AUTO: any */
    uint64_t write_budget;  /* bytes a day and root; KVT_AUTO: any */
    uint64_t write_dwpd;    /* per cent of a root's cap a day; KVT_AUTO: any */
    int admission;          /* enum kvt_admit */
    int plan;               /* enum kvt_plan_setting */
    int level;              /* enum kvt_level */
    int direct;             /* -1 auto, 0 off, 1 required */
    int pin;                /* enum kvt_pin_setting */
    int gds;                /* likewise */
    int gpu_tune;
    int io;          /* enum kvt_io_backend */
    int io_register; /* register dram with the ring */
    int write;       /* enum kvt_write, never DEFAULT */
    int disk_required;
    int guard;
    int enabled;
    int shadow;           /* nothing is loaded, and what that would have saved is counted */
    uint64_t trace_max;   /* bytes of both files of the trace */
    char trace[1024];     /* file that prompts are recorded in; "": none */
    char plan_file[1024]; /* what plans have learnt; "": in the first root, if there is one */
    uint64_t spin;        /* ns; KVT_AUTO: nobody spins */
    char socket[108];     /* of a kvtierd; "": the store is in this process */
    int env;              /* 1: KVTIER_CONFIG is applied at open */
    char remote[1024];    /* the tier that machines share; "": none */
    char remote_auth[1024], remote_mac[1024], remote_ca[1024]; /* files; "": none */
    uint64_t remote_deadline;                                  /* ns */
    uint64_t remote_ttl;                                       /* ns; KVT_AUTO: for ever */
    uint64_t remote_queue;                                     /* bytes */
    int remote_write;                                          /* enum kvt_remote_write */
    uint64_t remote_cap;                                       /* bytes; KVT_AUTO: any */
    uint64_t remote_ns_cap;                                    /* bytes; KVT_AUTO: any */
    uint64_t plan_remote;                                      /* bytes a second */
    uint32_t exclude_count;
    struct kvt_layer_range { /* layers that are stored raw */
        uint32_t from, to;   /* both included */
    } exclude[KVT_EXCLUDES_MAX];
    uint32_t ns_limit_count;
    struct kvt_ns_rule ns_limits[KVT_NS_RULES_MAX];
    uint32_t disk_count;
    struct kvt_disk_setting disks[KVT_DISKS_MAX];
    const struct kvt_pin_ops *pin_ops; /* no option: a test's hook; NULL: mlock */
    /* No option: what a test or a benchmark puts around the I/O of each root (slower drives). Takes
     * over what it is given; NULL: it could not, and the root is off. */
    struct kvt_io *(*io_wrap)(void *arg, struct kvt_io *inner);
    void *io_wrap_arg;
};

struct kvt_config {
    struct kvt_settings settings;
    kvt_log_fn log_fn;
    void *log_arg;
    char error[512];
};

/* A deep copy, to be freed with kvt_config_free(). 0, -ENOMEM. */
int kvt_config_copy(const struct kvt_config *config, struct kvt_config **out);

/* Apply the environment variable KVTIER_CONFIG unless the program set env=no. 0 (not set, or
 * applied: *applied is 1), KVT_E_CONFIG_*; kvt_config_error() has the sentence. */
int kvt_config_apply_env(struct kvt_config *config, int *applied);

/* Replace every "auto" by its value and check that the values fit together. 0 or
 * KVT_E_CONFIG_VALUE; kvt_config_error() has the sentence. */
int kvt_settings_resolve(struct kvt_config *config);

/* Bytes that may be written in a day to a root of that cap; 0: any. */
uint64_t kvt_settings_root_writes(const struct kvt_settings *settings, uint64_t cap_bytes);

/* Segments that each root may keep open within fds_max. */
uint32_t kvt_settings_files(const struct kvt_settings *settings);

#endif
