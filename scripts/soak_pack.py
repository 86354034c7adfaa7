"""What soak-wide.py packs: programs, what they load, and what planted bugs are built with."""
import os
import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
NEEDED = {
    "build/tests": ["test_sim", "test_power_loss", "test_bit_flips", "test_kill_ledger",
                    "test_store_fail_at_n", "test_daemon_kill", "test_redis_cluster",
                    "test_full_disk",
                    "test_store_model", "test_session_model", "test_store_crash", "test_l2_crash"],
    "build": ["kvtierd"],
    "build-asan/tests": ["test_alloc_fail", "test_alloc_fail_flows"],
    "build-tsan/tests": ["test_history"],
    "build-fuzz/fuzz": [f.stem for f in sorted((ROOT / "tests/fuzz").glob("fuzz_*.c"))],
}
SYSTEM = r"^(ld-|libc\.|libm\.|libdl\.|libpthread\.|librt\.|libgcc_s\.|linux-vdso)"
LIBRARIES = {"libxxhash": "xxhash", "jansson": "jansson", "cmocka": "cmocka",
             "liburing": "uring", "libssl": "ssl", "libcrypto": "crypto"}  # pkg-config: -l
PKG_CONFIG = """#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH=$here/../lib PKG_CONFIG_LIBDIR=$here/../lib/pkgconfig
exec "$here/pkgconf" "$@"
"""


def copy_libraries(program, target):
    said = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    for library, path in re.findall(r"^\s*(\S+) => (\S+)", said, re.M):
        if not re.match(SYSTEM, library):
            shutil.copy(path, target / library)


def pack_programs(target):
    for folder, names in NEEDED.items():
        place = target / folder.split("/")[0]
        place.mkdir(exist_ok=True)
        for name in names:
            subprocess.run(["strip", "--strip-debug", "-o", place / name, ROOT / folder / name],
                           check=True)
            copy_libraries(place / name, target / "lib")
    (target / "bin").mkdir(exist_ok=True)
    for name in ("redis-server", "redis-cli"):
        path = shutil.which(name)
        if path:
            shutil.copy(os.path.realpath(path), target / "bin" / name)
            copy_libraries(path, target / "lib")
    shutil.copytree(ROOT / "tests/fuzz/corpus", target / "corpus", dirs_exist_ok=True)


def pkg_config(*args):
    return subprocess.run(["pkg-config", *args], capture_output=True, text=True,
                          check=True).stdout.strip()


def pack_prefix(prefix):
    """Headers and libraries under one prefix, and a pkg-config that finds them wherever it lies."""
    for folder in ("bin", "include", "lib/pkgconfig"):
        (prefix / folder).mkdir(parents=True, exist_ok=True)
    for package, library in LIBRARIES.items():
        if subprocess.run(["pkg-config", "--exists", package]).returncode:
            continue
        real = pathlib.Path(subprocess.run(
            ["cc", f"-print-file-name=lib{library}.so"], capture_output=True, text=True,
            check=True).stdout.strip()).resolve()
        soname = re.search(r"SONAME\s+(\S+)", subprocess.run(
            ["objdump", "-p", real], capture_output=True, text=True).stdout)[1]
        shutil.copy(real, prefix / "lib" / soname)
        link = prefix / "lib" / f"lib{library}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(soname)
        (prefix / "lib/pkgconfig" / f"{package}.pc").write_text(
            f"prefix=${{pcfiledir}}/../..\nName: {package}\nDescription: {package}\n"
            f"Version: {pkg_config('--modversion', package)}\n"
            f"Cflags: -I${{prefix}}/include\nLibs: -L${{prefix}}/lib -l{library}\n")
    include = pathlib.Path("/usr/include")
    for name in ("xxhash.h", "xxh3.h", "jansson.h", "jansson_config.h", "liburing.h", "openssl", "liburing"):
        if (include / name).is_dir():
            shutil.copytree(include / name, prefix / "include" / name, dirs_exist_ok=True)
        elif (include / name).exists():
            shutil.copy(include / name, prefix / "include")
    for header in [*include.glob("cmocka*"), *include.glob("*-linux-gnu/jansson_config.h")]:
        shutil.copy(header, prefix / "include")
    for folder in include.glob("*-linux-gnu/openssl"):
        shutil.copytree(folder, prefix / "include/openssl", dirs_exist_ok=True)
    program = shutil.which("pkgconf")
    if program:
        shutil.copy(program, prefix / "bin/pkgconf")
        copy_libraries(program, prefix / "lib")
        (prefix / "bin/pkg-config").write_text(PKG_CONFIG)
        (prefix / "bin/pkg-config").chmod(0o755)


def pack_tree(target):
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file() and not name.startswith(("bench/", "docs/", "python/", "examples/")):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def pack(target):
    shutil.rmtree(target, ignore_errors=True)
    (target / "lib").mkdir(parents=True)
    pack_programs(target)
    pack_prefix(target / "prefix")
    pack_tree(target / "tree")
    (target / "commit").write_text(subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True,
        check=True).stdout)
    whole = target.with_name(target.name + ".tar.xz")
    subprocess.run(["tar", "-C", target.parent, "-I", "xz -T1 --lzma2=preset=5,dict=96MiB", "-cf", whole, target.name],
                   check=True)
    print(f"{whole}: {whole.stat().st_size / 1048576:.1f} MiB")
