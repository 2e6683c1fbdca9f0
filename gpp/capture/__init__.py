"""Capture of PyTorch models (`build.capture`), and the modules of stages cut from a capture (`stage.build_stage`)."""
