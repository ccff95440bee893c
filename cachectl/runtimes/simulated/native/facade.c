int cachectl_simulated_facade; /* A library of this name must exist; its symbols are in libcachectl_cann.so. */
