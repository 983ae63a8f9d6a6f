/* A C program that knows nothing of kvist but what is installed. */
#include <kvist/client.h>
#include <kvist/version.h>
#include <stdio.h>

int main(void)
{
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    struct kvist_pool_options pool_options = KVIST_POOL_OPTIONS_INIT;
    struct kvist_error err = KVIST_ERROR_INIT;
    struct kvist_client *client = NULL;
    struct kvist_pool *pool = NULL;
    const struct kvist_pool_field fields[] = {{"model", "consumer", 8}};
    options.socket_path = "/nonexistent/kvist.sock";
    options.role = KVIST_ROLE_ENGINE;
    options.session_id[0] = 1;
    pool_options.fields = fields;
    pool_options.field_count = 1;
    pool_options.slot_bytes = 4096;
    if (kvist_client_create(&options, &client, &err) != KVIST_OK ||
        kvist_pool_open(client, &pool_options, &pool, &err) != KVIST_OK) {
        (void)fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    enum kvist_status status = kvist_client_wait(client, 10000, &err);
    (void)printf("%s: %s\n", kvist_status_name(status), err.text);
    kvist_client_destroy(&client);
    return status == KVIST_TIMED_OUT && KVIST_WIRE_MAJOR == 1 ? 0 : 1;
}
