// The same in C++.
#include <kvist/client.h>
#include <kvist/version.h>

#include <cstdio>

int main()
{
    kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    kvist_pool_options pool_options = KVIST_POOL_OPTIONS_INIT;
    kvist_error err = KVIST_ERROR_INIT;
    kvist_client *client = nullptr;
    kvist_pool *pool = nullptr;
    const kvist_pool_field fields[] = {{"model", "consumer", 8}};
    options.socket_path = "/nonexistent/kvist.sock";
    options.role = KVIST_ROLE_ENGINE;
    options.session_id[0] = 1;
    pool_options.fields = fields;
    pool_options.field_count = 1;
    pool_options.slot_bytes = 4096;
    if (kvist_client_create(&options, &client, &err) != KVIST_OK ||
        kvist_pool_open(client, &pool_options, &pool, &err) != KVIST_OK) {
        std::fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    const kvist_status status = kvist_client_wait(client, 10000, &err);
    std::printf("%s: %s\n", kvist_status_name(status), err.text);
    kvist_client_destroy(&client);
    return status == KVIST_TIMED_OUT && KVIST_WIRE_MAJOR == 1 ? 0 : 1;
}
