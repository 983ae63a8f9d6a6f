# The protocols of proto/shm/layout.h under every execution that C11 allows. Included by ../CMakeLists.txt.
set(model ${CMAKE_CURRENT_SOURCE_DIR}/model)
kvist_add_unit(litmus ${model}/litmus_test.c)
target_sources(test_litmus PRIVATE ${model}/explore.c ${model}/machine.c)
target_include_directories(test_litmus BEFORE PRIVATE ${model}/shadow)
