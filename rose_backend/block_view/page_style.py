"""The style sheet of the page: light and dark, wide and narrow, nothing loaded from elsewhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbf9f7; --ink: #241f23; --faint: #6a6168; --line: #ddd5da; --card: #ffffff; --rose: #b01e68;
  --shared: #b01e68; --shared-tint: #fdeaf3; --held: #17693b; --held-tint: #e8f6ed;
  --clone_source: #8a4b00; --clone_source-tint: #fff1d6; --cached: #1b5f9c; --cached-tint: #e7f1fb;
  --free: #6a6168; --free-tint: transparent; --null: #6a6168; --null-tint: transparent;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #171318; --ink: #f1eaef; --faint: #ab9fa8; --line: #40363f; --card: #211b22; --rose: #ff8fc2;
    --shared: #ff8fc2; --shared-tint: #3b1a2c; --held: #74d79b; --held-tint: #14301f;
    --clone_source: #ffc65c; --clone_source-tint: #3a2a0c; --cached: #86c5ff; --cached-tint: #14283a;
    --free: #ab9fa8; --null: #ab9fa8;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2rem clamp(1rem, 4vw, 3rem) 4rem; max-width: 66rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif;
}
h1 { margin: 0 0 .5rem; font-size: clamp(1.7rem, 5vw, 2.5rem); line-height: 1.15; letter-spacing: -.02em; }
h1 span, .number { color: var(--rose); }
h2 { margin: 0 0 .4rem; font-size: clamp(1.15rem, 3vw, 1.45rem); line-height: 1.25; }
p { margin: 0 0 .8rem; max-width: 46rem; }
code { font: .9em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
ol, ul { margin: 0; padding: 0; list-style: none; }
a { color: inherit; text-underline-offset: .2em; }
.faint { color: var(--faint); }
.sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }

nav ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: .2rem 1.5rem; }
.legend { margin: 1.2rem 0 1.6rem; display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; font-size: .9rem; }
.legend li { display: flex; align-items: center; gap: .45rem; }
.step { margin-top: 2.2rem; padding-top: 1.6rem; border-top: 1px solid var(--line); }
.calls { display: flex; flex-wrap: wrap; gap: .4rem; margin: 0 0 1rem; }
.calls code { padding: .15rem .55rem; border: 1px solid var(--line); border-radius: .4rem; background: var(--card); }

.strips { position: relative; overflow-x: auto; padding: .2rem; }
.strip, .links {
  display: grid; gap: 0 .8rem;
  grid-template-columns: 6.5rem repeat(var(--columns), minmax(var(--card-min), var(--card-max)));
}
.strip.cached { margin-top: 1.2rem; }
.label { align-self: center; font-size: .85rem; line-height: 1.35; color: var(--faint); }
.label span { display: block; }
.label b { display: block; color: var(--ink); font-size: 1.05rem; }
.strip.sequence .label b { font-size: 1.5rem; line-height: 1.1; }

.card {
  display: flex; flex-direction: column; gap: .45rem; padding: .5rem .6rem;
  border: 2px solid var(--tone); border-radius: .6rem; background: var(--tint); font-size: .85rem;
}
.card header, .card footer { display: flex; justify-content: space-between; gap: .1rem .6rem; flex-wrap: wrap; }
.card header { color: var(--tone); font-weight: 600; }
.card footer { margin-top: auto; color: var(--faint); }
.slots { display: flex; flex-wrap: wrap; gap: .25rem; font: .95rem/1.4 ui-monospace, Menlo, Consolas, monospace; }
.slot {
  min-width: 1.6em; min-height: 1.75em; padding: .1em .35em; border: 1px solid var(--line); border-radius: .3rem;
  background: var(--card); overflow-wrap: anywhere;
}
.slot.foreign { color: var(--faint); text-decoration: line-through; border-style: dashed; }
.slot.reserved {
  min-width: 2.4em; border: 1px dashed var(--tone);
  background: repeating-linear-gradient(-45deg, transparent 0 5px, var(--line) 5px 6px);
}
.slot.empty { min-width: 1em; border-color: transparent; background: none; color: var(--faint); }
.slot.empty::before { content: "·"; }

.link { justify-self: center; padding: .35rem 0; font-size: .85rem; font-weight: 600; text-align: center; }
.link::before, .link::after { content: ""; display: block; margin: 0 auto; height: .55rem; width: 4px; }
.link.same { color: var(--shared); }
.link.same::before, .link.same::after { background: var(--shared); }
.link.copy { color: var(--clone_source); }
.link.copy::before { background: repeating-linear-gradient(var(--clone_source) 0 4px, transparent 4px 7px); }
.link.copy::after {
  width: 0; height: 0; border: .5rem solid transparent; border-top-color: var(--clone_source); border-bottom: 0;
}

.pool { display: flex; flex-wrap: wrap; gap: .3rem; margin: 1.4rem 0 .6rem; }
.pool li {
  min-width: 3.1rem; padding: .15rem .3rem; border: 1px solid var(--tone); border-radius: .4rem;
  background: var(--tint); color: var(--tone); font-size: .85rem; text-align: center;
}
.pool li.free, .pool li.null { border-style: dashed; }
.counts { font-size: .9rem; margin: 0; max-width: none; }
.counts b { font-weight: 600; }

.shared { --tone: var(--shared); --tint: var(--shared-tint); }
.held { --tone: var(--held); --tint: var(--held-tint); }
.clone_source { --tone: var(--clone_source); --tint: var(--clone_source-tint); }
.card.cached, .pool .cached, .legend .cached { --tone: var(--cached); --tint: var(--cached-tint); }
.free { --tone: var(--free); --tint: var(--free-tint); }
.null { --tone: var(--null); --tint: var(--null-tint); }
.legend .slot { flex: none; }
.legend .mark { color: var(--tone); font-size: 1.05rem; }

@media (max-width: 40rem) {
  nav ol { grid-template-columns: 1fr; }
  .strip, .links { grid-template-columns: repeat(var(--columns), minmax(9.2rem, 1fr)); gap: 0 .5rem; }
  .strip .label { grid-column: 1 / -1; padding: .3rem 0; position: sticky; left: 0; justify-self: start; }
  .strip .label > * { display: inline; margin-right: .5rem; }
  .links .label { display: none; }
}
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
@media print { .step { break-inside: avoid; } }
"""
