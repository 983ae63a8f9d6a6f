# libkvist against a peer that the test steps by hand.
foreach(part link pool)
    kvist_add_unit(client_${part} unit/client_${part}_test.c kvist_client_static)
    target_sources(test_client_${part} PRIVATE unit/client_fixture.c unit/client_peer.c)
endforeach()
