/* Failures from the field about identity and privacy: C13 C15 C17 C18 C76 C77.
 *
 * Method: one base identity with stored blocks; namespaces that differ in exactly one thing must
 * see none of them, in DRAM and on disk; and the files of a root give nothing away.
 */
#include "support/rig.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"

static struct rig rig;

static void open_disk(const char *config)
{
    struct rig_shape shape = rig_shape_small(16);
    rig_init(&rig, &shape, config, "32MiB");
    rig_open(&rig);
}

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static long run_in(struct kvt_ns *ns, uint64_t first, uint32_t n, uint32_t shard)
{
    struct kvt_key keys[16];
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(first + i);
        keys[i].shard = shard;
    }
    return kvt_lookup(ns, keys, n, NULL, NULL);
}

/* Hits of a namespace of this identity and layout on the ten base blocks. */
static long hits(const struct kvt_identity *identity, const struct kvt_layout *layout)
{
    struct kvt_ns *ns = NULL;
    int rc = kvt_ns_open(rig.cache, identity, layout, &ns);
    if (rc != 0)
        fail_msg("kvt_ns_open: %s", kvt_strerror(rc));
    long run = run_in(ns, 1, 10, 0);
    kvt_ns_close(ns);
    return run;
}

static void vary_identity(void)
{
    struct kvt_identity base = rig.identity;
    static const size_t fields[] = {
        offsetof(struct kvt_identity, engine),  offsetof(struct kvt_identity, key_scheme),
        offsetof(struct kvt_identity, model),   offsetof(struct kvt_identity, revision),
        offsetof(struct kvt_identity, adapter), offsetof(struct kvt_identity, layout),
        offsetof(struct kvt_identity, rope),    offsetof(struct kvt_identity, rotation),
        offsetof(struct kvt_identity, extra),
    };
    for (size_t i = 0; i < KVT_ARRAY_LEN(fields); i++) {
        struct kvt_identity other = base;
        const char *text = "other";
        memcpy((char *)&other + fields[i], &text, sizeof(text));
        assert_int_equal(hits(&other, &rig.layout), 0);
        assert_int_equal(hits(&base, &rig.layout), 10);
    }
    struct kvt_identity other = base;
    other.tp_size = 2;
    assert_int_equal(hits(&other, &rig.layout), 0);
    other = base;
    other.pp_size = 2;
    assert_int_equal(hits(&other, &rig.layout), 0);
    other.pp_rank = 1;
    assert_int_equal(hits(&other, &rig.layout), 0);
    other = base;
    other.salt = "salt";
    other.salt_len = 4;
    assert_int_equal(hits(&other, &rig.layout), 0);
    /* one string moved to its neighbour: the record is length-prefixed */
    other = base;
    other.model = "";
    other.revision = base.model;
    assert_int_equal(hits(&other, &rig.layout), 0);
}

static void vary_layout(void)
{
    struct kvt_part parts[RIG_PARTS_MAX];
    struct kvt_layout layout = rig.layout;
    layout.parts = parts;
#define VARY(statement)                                    \
    do {                                                   \
        memcpy(parts, rig.parts, sizeof(parts));           \
        layout.block_tokens = rig.layout.block_tokens;     \
        layout.part_count = rig.layout.part_count;         \
        statement;                                         \
        assert_int_equal(hits(&rig.identity, &layout), 0); \
    } while (0)
    VARY(parts[0].dtype = parts[1].dtype = KVT_DTYPE_F16);
    VARY(parts[1].dtype = KVT_DTYPE_F16);
    VARY(parts[0].kind = KVT_PART_V);
    VARY(layout.block_tokens = 32);
    VARY(layout.part_count = 1);
    VARY(parts[0].heads = parts[1].heads = 4);
    VARY(parts[0].head_dim = parts[1].head_dim = 128);
    VARY((parts[0].heads = 1, parts[0].head_dim = 128)); /* the same number of bytes */
#undef VARY
    assert_int_equal(hits(&rig.identity, &rig.layout), 10);
}

static void test_c13_every_field_that_differs_gives_no_hits(void **state)
{
    (void)state;
    open_disk("dram=8MiB");
    assert_int_equal(rig_store(&rig, 1, 10, 0, NULL), 10);
    vary_identity();
    vary_layout();
    assert_int_equal(run_in(rig.ns, 1, 10, 1), 0); /* the TP rank is the key's shard */
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_reopen(&rig); /* and the same from disk */
    vary_identity();
    vary_layout();
    assert_int_equal(run_in(rig.ns, 1, 10, 1), 0);
    assert_int_equal(rig_load(&rig, 1, 10, NULL), 10);
}

static void test_c15_a_revision_is_switched_live_and_purged(void **state)
{
    struct kvt_ns *r2;
    struct kvt_identity other;
    (void)state;
    open_disk("dram=8MiB");
    rig.identity.revision = "r1";
    rig_reopen(&rig);
    uint64_t used = rig_stat(&rig, "dram.bytes_used");
    assert_int_equal(rig_store(&rig, 1, 10, 0, NULL), 10);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_true(rig_stat(&rig, "dram.bytes_used") > used);
    assert_int_equal(rig_stat(&rig, "disk.blocks"), 10);
    other = rig.identity;
    other.revision = "r2";
    assert_int_equal(kvt_ns_open(rig.cache, &other, &rig.layout, &r2), 0);
    assert_int_equal(run_in(r2, 1, 10, 0), 0);
    struct kvt_ns *r1 = rig.ns;
    rig.ns = r2;
    assert_int_equal(rig_load(&rig, 1, 10, NULL), 0);
    rig.ns = r1;
    assert_int_equal(rig_load(&rig, 1, 10, NULL), 10);
    assert_int_equal(kvt_purge(r1, NULL, 0), 10);
    assert_int_equal(rig_stat(&rig, "dram.bytes_used"), used);
    assert_int_equal(rig_stat(&rig, "disk.blocks"), 0);
    assert_int_equal(rig_load(&rig, 1, 10, NULL), 0);
    kvt_ns_close(r2);
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 1, 10, NULL), 0); /* and they do not come back */
}

/* Nothing in a root is named after what users give; names are short and plain. */
static void check_names(const char *dir)
{
    DIR *handle = opendir(dir);
    assert_non_null(handle);
    const struct dirent *entry;
    while ((entry = readdir(handle)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        assert_true(strlen(entry->d_name) <= 255);
        assert_int_equal(strspn(entry->d_name, "abcdefghijklmnopqrstuvwxyz0123456789-."),
                         strlen(entry->d_name));
        assert_null(strstr(entry->d_name, "secret"));
    }
    closedir(handle);
}

static unsigned entries_of(const char *dir)
{
    unsigned count = 0;
    DIR *handle = opendir(dir);
    assert_non_null(handle);
    while (readdir(handle) != NULL)
        count++;
    closedir(handle);
    return count;
}

static void test_c17_names_and_salts_never_enter_a_path(void **state)
{
    static const struct {
        const char *bytes;
        size_t len;
    } salts[] = {{"../../secret", 12}, {"a\0secret", 8},      {"line\nsecret", 11},
                 {"/etc/secret", 11},  {"\xc3\xa9secret", 8}, {"", 0}};
    char parent[128], model[4097], inside[256];
    (void)state;
    rig_dir_make(parent, sizeof(parent));
    memset(model, 'm', 4096);
    memcpy(model, "../secret/", 10);
    model[4096] = '\0';
    struct rig_shape shape = rig_shape_small(16);
    rig_init(&rig, &shape, "dram=8MiB", "32MiB");
    rig_dir_remove(rig.dir);
    snprintf(inside, sizeof(inside), "%.100s/root", parent);
    snprintf(rig.dir, sizeof(rig.dir), "%.120s", inside);
    rig.identity.model = model;
    for (size_t i = 0; i < KVT_ARRAY_LEN(salts); i++) {
        rig.identity.salt = salts[i].bytes;
        rig.identity.salt_len = salts[i].len;
        rig_open(&rig);
        assert_int_equal(rig_lookup(&rig, 1, 10), 0); /* no salt sees another's */
        assert_int_equal(rig_store(&rig, 1, 10, 0, NULL), 10);
        assert_int_equal(kvt_flush(rig.cache), 0);
        rig_reopen(&rig);
        assert_int_equal(rig_load(&rig, 1, 10, NULL), 10);
        rig_close(&rig);
        check_names(rig.dir);
        assert_int_equal(entries_of(parent), 3); /* ".", "..", "root" */
    }
    rig_dir_remove(parent);
}

static void test_c18_same_adapter_name_other_weights(void **state)
{
    (void)state;
    open_disk("dram=8MiB");
    struct kvt_identity one = rig.identity, two;
    one.extra = "adapter name=tuned id=1";
    one.adapter = "sha256:1111";
    two = one;
    two.adapter = "sha256:2222";
    rig.identity = one;
    rig_reopen(&rig);
    assert_int_equal(rig_store(&rig, 1, 10, 0, NULL), 10);
    assert_int_equal(hits(&one, &rig.layout), 10);
    assert_int_equal(hits(&two, &rig.layout), 0);
}

static void check_modes(const char *dir)
{
    struct stat st;
    assert_int_equal(stat(dir, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0700);
    DIR *handle = opendir(dir);
    const struct dirent *entry;
    assert_non_null(handle);
    while ((entry = readdir(handle)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        assert_int_equal(fstatat(dirfd(handle), entry->d_name, &st, AT_SYMLINK_NOFOLLOW), 0);
        assert_true(S_ISREG(st.st_mode));
        assert_int_equal(st.st_mode & 07777, 0600);
    }
    closedir(handle);
}

static void test_c76_modes_whatever_the_umask_and_no_symlink(void **state)
{
    char link[160];
    (void)state;
    mode_t old = umask(0);
    struct rig_shape shape = rig_shape_small(16);
    rig_init(&rig, &shape, "dram=8MiB", "32MiB");
    assert_int_equal(rmdir(rig.dir), 0); /* made by the library */
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, 16, 0, NULL), 16);
    assert_int_equal(kvt_flush(rig.cache), 0);
    check_modes(rig.dir);
    rig_close(&rig);
    check_modes(rig.dir);
    umask(old);
    snprintf(link, sizeof(link), "%s.link", rig.dir);
    assert_int_equal(symlink(rig.dir, link), 0);
    struct rig other;
    rig_init(&other, &shape, "dram=8MiB,disk_required=yes", NULL);
    snprintf(other.dir, sizeof(other.dir), "%.127s", link);
    snprintf(other.disk_cap, sizeof(other.disk_cap), "32MiB");
    assert_int_equal(rig_try_open(&other), KVT_E_SYMLINK);
    assert_non_null(strstr(other.error, link));
    assert_non_null(strstr(other.error, "symbolic link"));
    other.dir[0] = '\0';
    rig_free(&other);
    assert_int_equal(unlink(link), 0);
}

static void test_c77_tenants_do_not_see_each_other(void **state)
{
    struct kvt_ns *b;
    (void)state;
    open_disk("dram=8MiB");
    rig.identity.salt = "secret-a";
    rig.identity.salt_len = 8;
    rig_reopen(&rig);
    assert_int_equal(rig_store(&rig, 1, 10, 0, NULL), 10);
    assert_int_equal(rig_load(&rig, 1, 10, NULL), 10);
    struct kvt_identity other = rig.identity;
    other.salt = "secret-b";
    for (int pass = 0; pass < 2; pass++) {
        assert_int_equal(kvt_ns_open(rig.cache, &other, &rig.layout, &b), 0);
        assert_int_equal(run_in(b, 1, 10, 0), 0);
        struct kvt_ns *a = rig.ns;
        rig.ns = b;
        assert_int_equal(rig_load(&rig, 1, 10, NULL), 0);
        assert_int_equal(kvt_purge(b, NULL, 0), 0); /* and cannot remove the other's */
        rig.ns = a;
        assert_int_equal(rig_load(&rig, 1, 10, NULL), 10);
        kvt_ns_close(b);
        check_names(rig.dir);
        assert_int_equal(kvt_flush(rig.cache), 0);
        rig_reopen(&rig); /* second pass: from disk */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c13_every_field_that_differs_gives_no_hits, tear_down),
        cmocka_unit_test_teardown(test_c15_a_revision_is_switched_live_and_purged, tear_down),
        cmocka_unit_test_teardown(test_c17_names_and_salts_never_enter_a_path, tear_down),
        cmocka_unit_test_teardown(test_c18_same_adapter_name_other_weights, tear_down),
        cmocka_unit_test_teardown(test_c76_modes_whatever_the_umask_and_no_symlink, tear_down),
        cmocka_unit_test_teardown(test_c77_tenants_do_not_see_each_other, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
