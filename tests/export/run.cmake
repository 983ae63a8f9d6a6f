# Install the build tree BUILD below WORK, at another prefix than it was configured for, and use what
# is there from C and C++, by the CMake package and by pkg-config.
foreach(name BUILD WORK SOURCE LIBDIR C_COMPILER CXX_COMPILER GENERATOR)
    if(NOT DEFINED ${name})
        message(FATAL_ERROR "run.cmake needs -D${name}=")
    endif()
endforeach()

function(run)
    execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)

run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${WORK}/package
    -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
run(${CMAKE_COMMAND} --build ${WORK}/package)
run(${WORK}/package/consumer_c)
run(${WORK}/package/consumer_cpp)

find_program(PKG_CONFIG pkg-config REQUIRED)
set(ENV{PKG_CONFIG_PATH} ${WORK}/prefix/${LIBDIR}/pkgconfig)
execute_process(COMMAND ${PKG_CONFIG} --cflags --libs kvist
    OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
set(ENV{LD_LIBRARY_PATH} ${WORK}/prefix/${LIBDIR})
run(${C_COMPILER} -std=c11 ${SOURCE}/consumer.c -o ${WORK}/by_pkgconfig_c ${flags})
run(${CXX_COMPILER} -std=c++17 ${SOURCE}/consumer.cpp -o ${WORK}/by_pkgconfig_cpp ${flags})
run(${WORK}/by_pkgconfig_c)
run(${WORK}/by_pkgconfig_cpp)
