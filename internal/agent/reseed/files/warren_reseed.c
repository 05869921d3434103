// The native part of Warren's reseed module for Node.js: a function that has
// OpenSSL seed its generator anew from the kernel, which keys and TLS draw from.
// JavaScript has no such call. Node's stable ABI (Node-API, version 1) is all that
// it uses, declared here, so that it needs no headers of Node.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

typedef void *napi_env, *napi_value, *napi_callback_info;
typedef napi_value (*napi_callback)(napi_env, napi_callback_info);
extern int napi_create_function(napi_env, const char *, size_t, napi_callback, void *, napi_value *);
extern int napi_get_boolean(napi_env, _Bool, napi_value *);

// OpenSSL's primary generator is the process's, and those of its threads follow
// it. It is found by name, as it is a library of its own or a part of node.
static int (*poll)(void);

static napi_value reseed(napi_env env, napi_callback_info info) {
	napi_value done = NULL;
	napi_get_boolean(env, poll && poll() == 1, &done);
	return done;
}

__attribute__((visibility("default"))) napi_value napi_register_module_v1(napi_env env, napi_value exports) {
	napi_value f = NULL;
	poll = (int (*)(void))dlsym(RTLD_DEFAULT, "RAND_poll");
	return napi_create_function(env, "reseed", 6, reseed, NULL, &f) == 0 ? f : exports;
}
