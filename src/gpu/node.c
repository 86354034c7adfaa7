/* Which NUMA node a GPU hangs on. See gpu.h.
 *
 * The driver names the device's place on the bus, the kernel knows the node of that place. Opens no
 * context. Threads: any.
 */
#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/fd.h"
#include "gpu/driver.h"
#include "gpu/gpu_internal.h"

/* The kernel writes its addresses in small letters. */
static void lower(char *text)
{
    for (; *text != '\0'; text++)
        *text = (char)tolower((unsigned char)*text);
}

/* The number in a file; -1: there is none, or the firmware does not say (the kernel writes -1). */
static int number_in(const char *path)
{
    char text[32] = "";
    FILE *file = kvt_fd_fopen(path);
    if (file == NULL)
        return -1;
    char *line = fgets(text, sizeof(text), file), *end = text;
    (void)fclose(file);
    long number = line != NULL ? strtol(text, &end, 10) : -1;
    return end == text || number < 0 || number > INT16_MAX ? -1 : (int)number;
}

int kvt_gpu_node(const char *library, int device, const char *sys)
{
    struct kvt_cuda cuda;
    kvt_cu_device handle;
    char reason[256], bus[32] = "", path[512];
    int count = 0, node = -1;
    if (kvt_cuda_load(&cuda, library, reason, sizeof(reason)) != 0)
        return -1;
    if (cuda.device_count(&count) == KVT_CU_OK && device >= 0 && device < count &&
        cuda.device_get(&handle, device) == KVT_CU_OK &&
        cuda.device_bus(bus, (int)sizeof(bus) - 1, handle) == KVT_CU_OK && bus[0] != '\0') {
        lower(bus);
        (void)snprintf(path, sizeof(path), "%s/bus/pci/devices/%s/numa_node", sys, bus);
        node = number_in(path);
    }
    kvt_cuda_unload(&cuda);
    return node;
}
