// Goal: a C++ program may include every public header and link the library.
// Method: names from several headers, one call. Exit 0 when the header and the library agree.
#include <kvtier/kvtier.h>

#include <cstdio>
#include <cstring>

int main()
{
    std::printf("%s, %s\n", kvt_version(), kvt_strerror(KVT_E_LOCKED));
    return std::strcmp(kvt_version(), KVT_VERSION_STRING) != 0;
}
