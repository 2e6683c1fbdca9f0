import sys, tempfile, time, torch, traceback, warnings
warnings.simplefilter("ignore")
from pathlib import Path
torch.set_num_threads(1)
from tests.idioms import case, parameters, state, hooks, layers, losses, optimizers
from tests.support.threads import workers_in_threads
pick=sys.argv[1:]
tot=time.process_time()
for c in case.IDIOMS:
    if pick and not any(p in c.make.__name__ for p in pick): continue
    t=time.process_time()
    with tempfile.TemporaryDirectory() as d:
        try: o=case.tried(c, Path(d)/"r", workers_in_threads)
        except Exception as e:
            if pick: traceback.print_exc()
            o=case.Outcome("failed",(f"CRASH {type(e).__name__}: {e}",))
    ok = o.kind==c.kind
    print(f"{'ok ' if ok else 'XX '} {c.make.__name__:20s} want {c.kind:8s} got {o.kind:8s} {o.difference:.1e} {time.process_time()-t:.2f}s", *( [" | ".join(o.said)[:260 if not pick else 2000].replace("\n"," ")] if (o.said) else []), flush=True)
print(time.process_time()-tot)
