"""A small language model trained on the CPU through fag_torch: `fag-torch demo`.

    main.py    the command
    data.py    the standard library's sources as packed documents
    model.py   the model, and its attention by fag_torch and by PyTorch's SDPA
    train.py   the training loop
    checks.py  gradients against float64, speed against SDPA
    report.py  the picture

Needs the extra `demo` (matplotlib, tqdm). Importing fag_torch imports nothing of this.
"""
