/* kvtier doctor: what works on this machine, what does not, and why.
 *
 * Each check ends in one state: ok; off (not there, nobody asked for it); warn (works, worse than
 * it could); fail (asked for, does not work). Exit 1 when any check failed.
 * Threads: one. It changes nothing but a scratch directory inside --dir (or its parent, where --dir
 * is new), and puts one record into the shared tier that --config names; it removes both again.
 */
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"
#include "cli_config.h"
#include "client/host.h"
#include "client/settings.h"
#include "commands.h"
#include "doctor.h"
#include "gpu/gds.h"
#include "io/io.h"
#include "kvtier/kvtier.h"
#include "remote/remote.h"
#include "remote_tool.h"
#include "root_check.h"
#include "stat_verdict.h"
#include "stats_file.h"
#include "store_dir.h"

#define PROBE_BYTES_DEFAULT (UINT64_C(64) << 20) /* half a second on a slow disk */
#define DETAIL_MAX 1024

enum state { STATE_OK, STATE_OFF, STATE_WARN, STATE_FAIL };
static const char *const state_name[] = {"ok", "off", "warn", "fail"};

struct doctor {
    int json;
    int failed;
    json_t *checks;
};

/* Record and show one check. Returns its JSON object (borrowed) so that figures can be added. */
__attribute__((format(printf, 4, 5))) static json_t *
check(struct doctor *doctor, const char *name, enum state state, const char *format, ...)
{
    char detail[DETAIL_MAX];
    va_list args;

    va_start(args, format);
    vsnprintf(detail, sizeof(detail), format, args);
    va_end(args);
    if (state == STATE_FAIL)
        doctor->failed = 1;
    if (!doctor->json)
        printf("%-4s  %-10s %s\n", state_name[state], name, detail);
    json_t *object =
        json_pack("{s:s, s:s, s:s}", "name", name, "state", state_name[state], "detail", detail);
    json_array_append_new(doctor->checks, object);
    return object;
}

static const char *bytes_or(uint64_t bytes, const char *none, char *buffer)
{
    return bytes == UINT64_MAX ? none : kvt_human_bytes(bytes, buffer);
}

static void set_bytes(json_t *object, const char *name, uint64_t bytes)
{
    json_object_set_new(object, name,
                        bytes == UINT64_MAX ? json_null() : json_integer((json_int_t)bytes));
}

static void check_codec(struct doctor *doctor)
{
    const char *forced = getenv("KVTIER_CODEC_ISA");
    const char *isa = kvt_codec_isa();
    char why[160] = "";

    if (forced && forced[0] && strcmp(forced, isa) != 0)
        check(doctor, "codec", STATE_FAIL, "KVTIER_CODEC_ISA=%s cannot be had here: %s is in force",
              forced, isa);
    int rc = kvt_doctor_codec(why, sizeof(why));
    json_t *object = check(doctor, "codec", rc ? STATE_FAIL : STATE_OK, "%s%s: %s", isa,
                           forced && forced[0] ? " (forced by KVTIER_CODEC_ISA)"
                                               : " (chosen for this processor)",
                           why);
    json_object_set_new(object, "isa", json_string(isa));
}

static void check_memory(struct doctor *doctor)
{
    struct kvt_doctor_memory m;
    char a[32], b[32], c[32];

    kvt_doctor_memory(&m);
    int tight = m.cgroup_bytes != UINT64_MAX && m.total_bytes && m.cgroup_bytes < m.total_bytes;
    json_t *object = check(doctor, "memory", STATE_OK, "%s, %s available, control group limit %s%s",
                           kvt_human_bytes(m.total_bytes, a), kvt_human_bytes(m.available_bytes, b),
                           bytes_or(m.cgroup_bytes, "none", c),
                           tight ? ": size \"dram\" by that limit, not by the machine" : "");
    set_bytes(object, "total_bytes", m.total_bytes);
    set_bytes(object, "available_bytes", m.available_bytes);
    set_bytes(object, "cgroup_bytes", m.cgroup_bytes);
    object = check(doctor, "memlock", STATE_OK,
                   "%s may be locked: pools in GPU memory and pin=required want all of dram",
                   bytes_or(m.memlock_bytes, "any amount", a));
    set_bytes(object, "memlock_bytes", m.memlock_bytes);
    /* a disk root keeps at most a few tens of segment files open */
    int few = m.files_max < 64;
    object = check(doctor, "files", few ? STATE_WARN : STATE_OK, "%s%llu open files allowed%s",
                   m.files_max == UINT64_MAX ? "more than " : "",
                   m.files_max == UINT64_MAX ? 1000000ull : (unsigned long long)m.files_max,
                   few ? ": a disk root needs up to 64; raise 'ulimit -n'" : "");
    set_bytes(object, "files_max", m.files_max);
}

static void check_io(struct doctor *doctor, const char *dir, uint64_t bytes)
{
    struct kvt_doctor_io io;
    char free_text[32], probe[32], why[KVT_ROOT_WHY_MAX], parent[PATH_MAX];

    if (!dir) {
        check(doctor, "disk", STATE_OFF, "not looked at: --dir DIR probes a directory");
        return;
    }
    const int root = kvt_root_check(dir, why); /* what kvt_open() would say */
    if (root < 0) {
        json_t *object = check(doctor, "disk", STATE_FAIL, "%s", why);
        json_object_set_new(object, "error", json_integer(root));
        return;
    }
    int rc = root == 1 ? kvt_root_parent(dir, parent, sizeof(parent)) : 0;
    if (rc == 0)
        rc = kvt_doctor_io(root == 1 ? parent : dir, bytes, &io);
    else
        snprintf(io.why, sizeof(io.why), "%s", kvt_strerror(rc));
    if (rc) {
        if (root == 1 && (rc == -ENOENT || rc == -EACCES || rc == -EPERM || rc == -EROFS))
            kvt_root_why(dir, rc, why); /* its parent takes no directory: /proc */
        else
            snprintf(why, sizeof(why), "%s: %s", dir, io.why);
        json_t *object = check(doctor, "disk", STATE_FAIL, "%s", why);
        json_object_set_new(object, "error", json_integer(rc));
        return;
    }
    json_t *object = check(doctor, "disk", io.direct ? STATE_OK : STATE_WARN,
                           "%s%s: %s (%s), %s; %s free; %s probe: write %.2f GB/s with sync, "
                           "read %.2f GB/s%s",
                           dir, root == 1 ? " (will be created)" : "", io.backend, io.backend_why,
                           io.why, kvt_human_bytes(io.free_bytes, free_text),
                           kvt_human_bytes(io.probe_bytes, probe), io.write_gbps, io.read_gbps,
                           io.direct ? "" : " (from the page cache, not the drive)");
    json_object_set_new(object, "dir", json_string(dir));
    json_object_set_new(object, "exists", json_boolean(root == 0));
    json_object_set_new(object, "backend", json_string(io.backend));
    json_object_set_new(object, "backend_why", json_string(io.backend_why));
    json_object_set_new(object, "direct", json_boolean(io.direct));
    json_object_set_new(object, "why", json_string(io.why));
    set_bytes(object, "free_bytes", io.free_bytes);
    set_bytes(object, "total_bytes", io.total_bytes);
    set_bytes(object, "probe_bytes", io.probe_bytes);
    json_object_set_new(object, "write_gbps", json_real(io.write_gbps));
    json_object_set_new(object, "read_gbps", json_real(io.read_gbps));
}

static json_t *paths_json(const struct kvt_cufile_paths *paths)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "n_total_reads", (json_int_t)paths->reads,
                     "read_bytes", (json_int_t)paths->bytes, "n_p2p_reads", (json_int_t)paths->p2p,
                     "n_nvfs_reads", (json_int_t)paths->nvfs, "n_posix_reads",
                     (json_int_t)paths->posix);
}

/* GPUDirect Storage between dir's drive and the device: the verdict, and the counters that prove
 * it. */
static void check_gds(struct doctor *doctor, struct kvt_gpu *gpu, const char *dir, uint64_t bytes)
{
    struct kvt_gds_report r;
    struct kvt_gds_opts opts = {.dir = dir, .bytes = bytes & ~(uint64_t)(KVT_GDS_READ_BYTES - 1)};
    char parent[PATH_MAX], why[KVT_ROOT_WHY_MAX], proof[160] = "no counters", speed[128] = "";

    if (!gpu || !dir) {
        check(doctor, "gds", STATE_OFF, "not looked at: %s",
              gpu ? "--dir DIR probes the drive of a directory" : "there is no GPU");
        return;
    }
    if (kvt_root_check(dir, why) == 1 && !kvt_root_parent(dir, parent, sizeof(parent)))
        opts.dir = parent;
    int rc = kvt_gds_probe(gpu, &opts, &r);
    if (rc) {
        check(doctor, "gds", STATE_OFF, "cannot be probed: %s", r.reason);
        return;
    }
    if (r.has_proof)
        snprintf(proof, sizeof(proof),
                 "one read of 1 MiB moved p2p %llu->%llu, nvfs %llu->%llu, posix %llu->%llu",
                 (unsigned long long)r.before.p2p, (unsigned long long)r.after.p2p,
                 (unsigned long long)r.before.nvfs, (unsigned long long)r.after.nvfs,
                 (unsigned long long)r.before.posix, (unsigned long long)r.after.posix);
    if (r.read_gbps > 0)
        snprintf(speed, sizeof(speed), "; %.2f GB/s, by O_DIRECT and a copy %.2f GB/s", r.read_gbps,
                 r.ordinary_gbps);
    json_t *object =
        check(doctor, "gds", r.verdict == KVT_GDS_ABSENT ? STATE_OFF : STATE_OK,
              "%s: %s (%s%s); %s%s%s", kvt_gds_name(r.verdict), r.reason, proof, speed,
              r.verdict == KVT_GDS_ABSENT ? "loads go through DRAM"
                                          : "gds=auto lets loads take it where it is faster",
              r.remedy[0] ? "; for a direct path: " : "", r.remedy);
    json_object_set_new(object, "verdict", json_string(kvt_gds_name(r.verdict)));
    json_object_set_new(object, "reason", json_string(r.reason));
    json_object_set_new(object, "remedy", json_string(r.remedy));
    json_object_set_new(object, "cufile_version", json_integer(r.version));
    if (r.has_proof) {
        json_object_set_new(object, "before", paths_json(&r.before));
        json_object_set_new(object, "after", paths_json(&r.after));
    }
    if (r.read_gbps > 0) {
        json_object_set_new(object, "read_gbps", json_real(r.read_gbps));
        json_object_set_new(object, "ordinary_gbps", json_real(r.ordinary_gbps));
    }
}

/* The device that a pool in GPU memory would use, or why there is none. */
static void check_gpu(struct doctor *doctor, const char *dir, uint64_t bytes)
{
    struct kvt_gpu *gpu = NULL;
    struct kvt_gpu_info info;
    char reason[256] = "";
    int rc = kvt_gpu_open(&(struct kvt_gpu_opts){.device = 0}, &gpu, reason, sizeof(reason));

    if (rc) {
        check(doctor, "gpu", STATE_OFF, "%s; pools in host memory work without one",
              reason[0] ? reason : kvt_strerror(rc));
        check_gds(doctor, NULL, dir, bytes);
        return;
    }
    kvt_gpu_info(gpu, &info);
    json_t *object = check(doctor, "gpu", STATE_OK,
                           "%s, compute capability %d.%d, driver for CUDA %d.%d: pools in its "
                           "memory can be registered",
                           info.name, info.capability / 10, info.capability % 10,
                           info.driver_version / 1000, info.driver_version % 1000 / 10);
    json_object_set_new(object, "device", json_string(info.name));
    json_object_set_new(object, "capability", json_integer(info.capability));
    check_gds(doctor, gpu, dir, bytes);
    kvt_gpu_close(gpu);
}

/* A store that is there already: who has it, and what its last numbers complain of. */
static void check_store(struct doctor *doctor, const char *dir)
{
    json_t *counters = dir ? kvt_stats_read(dir, NULL) : NULL;
    struct kvt_stat_facts facts = {.path = dir, .counters = counters};
    size_t i, warnings = 0;
    const char *first = "";
    json_t *verdict;

    if (!counters)
        return;
    facts.owner_pid = kvt_dir_owner(dir);
    json_t *verdicts = kvt_stat_verdicts(&facts);
    json_array_foreach(verdicts, i, verdict)
    {
        if (strcmp(json_string_value(json_object_get(verdict, "state")), "warn") != 0)
            continue;
        if (!warnings++)
            first = json_string_value(json_object_get(verdict, "text"));
    }
    char owner[64] = "no process owns it";
    if (facts.owner_pid)
        snprintf(owner, sizeof(owner), "process %lld owns it", (long long)facts.owner_pid);
    json_t *object = check(doctor, "store", warnings ? STATE_WARN : STATE_OK,
                           "%s: a store is there, %s; %zu warnings in its last numbers%s%s; beside "
                           "an owner 'kvtier stat', 'top', 'verify' and 'inspect' work",
                           dir, owner, warnings, warnings ? ", the first: " : "", first);
    json_object_set_new(object, "warnings", json_integer((json_int_t)warnings));
    json_decref(verdicts);
    json_decref(counters);
}

/* Does the file system hold the cap? */
static void check_cap(struct doctor *doctor, const struct kvt_disk_setting *disk)
{
    struct kvt_root_room room;
    char text[640] = "";

    if (kvt_root_room(disk->path, disk->cap_bytes, &room))
        return;
    bool is_short = kvt_root_room_short(&room, disk->path, text, sizeof(text));
    char cap[32], used[32], left[32];
    json_t *object =
        is_short
            ? check(doctor, "root", STATE_WARN, "%s", text)
            : check(doctor, "root", STATE_OK, "%s: its cap of %s fits: %s used, %s free",
                    disk->path, kvt_human_bytes(room.cap_bytes, cap),
                    kvt_human_bytes(room.used_bytes, used), kvt_human_bytes(room.free_bytes, left));
    set_bytes(object, "cap_bytes", room.cap_bytes);
    set_bytes(object, "used_bytes", room.used_bytes);
    set_bytes(object, "free_bytes", room.free_bytes);
}

static void warn_quota(void *doctor, int level, const char *text)
{
    (void)level;
    check(doctor, "quota", STATE_WARN, "%s", text);
}

/* Do the options fit the machine? Only what was set by hand or by the environment can be too much;
 * the default of dram may be, too, on a very small one. */
static void check_options(struct doctor *doctor, const struct kvt_config *config)
{
    const struct kvt_settings *settings = &config->settings;
    struct kvt_doctor_memory m;
    char want[32], have[32];

    kvt_doctor_memory(&m);
    uint64_t room = KVT_MIN(m.available_bytes ? m.available_bytes : UINT64_MAX, m.cgroup_bytes);
    if (settings->dram > room)
        check(doctor, "dram", STATE_WARN,
              "dram=%s, and %s can be had: the kernel would kill or swap; lower it, or free memory",
              kvt_human_bytes(settings->dram, want), kvt_human_bytes(room, have));
    if (!settings->socket[0]) /* else they are the kvtierd's */
        kvt_quota_unused_tell(settings, &(struct kvt_log){warn_quota, doctor, KVT_LOG_WARN});
    for (uint32_t i = 0; i < settings->disk_count; i++) {
        const struct kvt_disk_setting *disk = &settings->disks[i];
        char why[KVT_ROOT_WHY_MAX];
        if (kvt_root_check(disk->path, why) < 0)
            check(doctor, "root", STATE_FAIL, "%s", why);
        else
            check_cap(doctor, disk);
    }
}

static const char *or_null(const char *path)
{
    return path[0] ? path : NULL;
}

/* The tier that machines share, as these options would use it: a record there and back. */
static void check_shared(struct doctor *doctor, const struct kvt_config *config, int offline)
{
    const struct kvt_settings *settings = &config->settings;
    const struct kvt_remote_where where = {.url = settings->remote,
                                           .auth_file = or_null(settings->remote_auth),
                                           .mac_file = or_null(settings->remote_mac),
                                           .ca_file = or_null(settings->remote_ca)};
    const int write = settings->remote_write != KVT_REMOTE_WRITE_OFF;
    struct kvt_remote_trial trial;
    char error[1200], size[32];
    json_t *object;
    int rc;

    if (!settings->remote[0] || settings->socket[0] || offline) {
        check(doctor, "shared", STATE_OFF, "not looked at: %s",
              !settings->remote[0]  ? "--config remote=URL tries a tier that machines share"
              : settings->socket[0] ? "it would be the kvtierd's"
                                    : "--offline");
        return;
    }
    rc = kvt_remote_try(&where, write, kvt_remote_patience(settings->remote_deadline), &trial,
                        error, sizeof(error));
    if (rc)
        object = check(doctor, "shared", STATE_FAIL, "%s", error);
    else if (write)
        object = check(doctor, "shared", STATE_OK,
                       "%s%s%s: %s there in %.1f ms and back in %.1f ms, and removed",
                       settings->remote, trial.about[0] ? ": " : "", trial.about,
                       kvt_human_bytes(trial.bytes, size), trial.put_s * 1e3, trial.get_s * 1e3);
    else
        object =
            check(doctor, "shared", STATE_OK, "%s%s%s answers (remote_write=off: nothing was put)",
                  settings->remote, trial.about[0] ? ": " : "", trial.about);
    json_object_set_new(object, "remote", json_string(settings->remote));
    if (rc)
        json_object_set_new(object, "error", json_integer(rc));
    if (trial.about[0])
        json_object_set_new(object, "server", json_string(trial.about));
    if (!rc && write) {
        json_object_set_new(object, "bytes", json_integer((json_int_t)trial.bytes));
        json_object_set_new(object, "put_s", json_real(trial.put_s));
        json_object_set_new(object, "get_s", json_real(trial.get_s));
    }
}

static void check_rest(struct doctor *doctor, const char *dir, uint64_t probe_bytes)
{
    char why[160];
    int rc = kvt_io_uring_probe(why, sizeof(why));

    check(doctor, "io_uring", rc ? STATE_OFF : STATE_OK, "%s%s", why,
          rc ? ": disks are read and written by threads (posix)"
             : ": used where it is faster than threads, measured at open");
    check_gpu(doctor, dir, probe_bytes);
#ifdef KVT_HAVE_LLAMA
    check(doctor, "llama.cpp", STATE_OK, "adapter built in");
#else
    check(doctor, "llama.cpp", STATE_OFF, "this build has no adapter; 'make demo' builds one");
#endif
}

int kvt_cmd_doctor(int argc, char **argv)
{
    struct doctor doctor = {0};
    int offline = 0;
    const char *dir = NULL, *config_text = NULL;
    uint64_t probe_bytes = PROBE_BYTES_DEFAULT;
    const struct kvt_cli_option options[] = {
        {.name = "dir",
         .metavar = "DIR",
         .help = "probe a directory for the disk tier",
         .text = &dir},
        {.name = "probe",
         .metavar = "SIZE",
         .help = "bytes written and read there (64MiB)",
         .size = &probe_bytes,
         .min = 1 << 20,
         .max = INT64_C(16) << 30},
        {.name = "config",
         .metavar = "K=V,...",
         .help = "check and show these options",
         .text = &config_text},
        {.name = "offline", .help = "ask no server of a shared tier", .flag = &offline},
        {.name = "json", .help = "one JSON object", .flag = &doctor.json},
    };
    struct kvt_config *config = NULL;
    char model[128];
    int rc = kvt_cli_parse("doctor", "[--dir DIR] [--config K=V,...] [--offline] [--json]", options,
                           sizeof(options) / sizeof(options[0]), NULL, 0, 0, NULL, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    rc = kvt_cli_config("doctor", config_text, &config);
    if (rc)
        goto out;
    kvt_cli_catch_interrupt(); /* a probe that is cut short removes what it made */
    doctor.checks = json_array();
    check(&doctor, "build", STATE_OK, "%s", kvt_build_info());
    int cpus = kvt_doctor_cpus(model, sizeof(model));
    json_object_set_new(check(&doctor, "cpu", STATE_OK, "%s, %d usable", model, cpus), "cpus",
                        json_integer(cpus));
    check_codec(&doctor);
    check_memory(&doctor);
    check_io(&doctor, dir, probe_bytes & ~UINT64_C(4095));
    check_store(&doctor, dir);
    check_options(&doctor, config);
    check_shared(&doctor, config, offline);
    check_rest(&doctor, dir, probe_bytes);
    if (doctor.json)
        rc = kvt_cli_json(json_pack("{s:s, s:b, s:O, s:o}", "version", kvt_version(), "ok",
                                    !doctor.failed, "checks", doctor.checks, "config",
                                    kvt_cli_config_json(config)));
    else if (putchar('\n') != EOF)
        kvt_cli_config_print(config);
    if (!rc && doctor.failed)
        rc = KVT_EXIT_PROBLEM;
out:
    json_decref(doctor.checks);
    kvt_config_free(config);
    return rc;
}
