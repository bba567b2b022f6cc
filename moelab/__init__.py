"""moelab: measure, model and verify the deployment of DeepSeek-style Mixture-of-Experts models.

The package is layered; each layer imports only those before it:

    config, hardware, stages -> results -> perf -> ops, comm -> model -> engine -> serve, launch, bench
    -> doctor, plots, notebook, cli

Importing this package imports nothing else: it touches no GPU, file, network or environment variable.
"""

__version__ = "0.1.0"
