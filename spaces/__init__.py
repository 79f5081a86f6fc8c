"""Not a package: gradio does `import spaces` for the ZeroGPU package and must not find this folder of apps instead."""

raise ImportError("`spaces` is a folder of apps; run one with `closedloop space NAME`, or python spaces/NAME/app.py.")
