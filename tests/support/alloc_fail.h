/* Memory that runs out: the N-th allocation from now on fails. For programs whose names begin with
 * test_alloc_fail. What OpenSSL and the C library take for themselves is not counted. Threads: any
 * may allocate; one arms. */
#ifndef KVT_TESTS_ALLOC_FAIL_H
#define KVT_TESTS_ALLOC_FAIL_H

/* The n-th one fails, and with from_then_on all after it. */
void alloc_fail_arm(long n, int from_then_on);
/* No more. Whether any has failed since arm. */
int alloc_fail_disarm(void);

#endif
