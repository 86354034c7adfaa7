/* Standard descriptors: see standard.h. They are opened the wrong way round: who reads the first,
 * or writes to the others, is refused by the kernel, as when they are closed. Threads: the first
 * one, before there are others. */
#include "daemon/standard.h"

#include <fcntl.h>
#include <unistd.h>

bool kvt_standard_hold(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 &&
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
            return false;
    return true;
}
