// Draws every [data-chart] with uPlot: lines, bands, events; smoothing and scale from the page's controls.
'use strict';
(() => {
  const HEIGHT = 210, NEAR = 8, DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
  const WHOLE = [1, 2, 5].flatMap((n) => [n, 10 * n, 100 * n, 1000 * n, 1e4 * n, 1e5 * n]).sort((a, b) => a - b);
  const SIGNS = { evaluation: '◆', restart: '▲', sign: '✖', resume: '●' };
  const drawn = new Map();  // by the figure's id: { text, plot }

  // Returns a colour of the style sheet in the present theme. A canvas can't read `light-dark(…)`; the computed value of a
  // registered property is a plain colour.
  const registered = new Set();
  function colour(name) {
    if (!registered.has(name)) CSS.registerProperty({ name: `--${name}`, syntax: '<color>', inherits: true, initialValue: 'gray' });
    registered.add(name);
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
  }
  const faint = (ink, percent) => `color-mix(in srgb, ${ink} ${percent}%, transparent)`;
  const log = () => document.getElementById('log')?.checked || false;
  // The limits of the x axis of all charts are two fields of the form, so that the page's address contains them.
  const axis_fields = () => ['from', 'to'].map((name) => document.querySelector(`#curves-form [name=${name}]`));
  const zoom = () => axis_fields().map((field) => (field?.value ? Number(field.value) : null));
  function zoomed(values) {
    axis_fields().forEach((field, i) => { if (field) field.value = values[i]; });
    axis_fields()[0]?.dispatchEvent(new Event('input', { bubbles: true }));
  }
  const smoothing = () => Number(document.getElementById('smoothing')?.value || 0);

  function number(value) {
    if (value === null || value === undefined) return '–';
    if (value === 0) return '0';
    const size = Math.abs(value);
    return size >= 1e6 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }

  // An exponential moving average, with Adam's correction for the bias towards 0 at the start.
  function smooth(values, factor) {
    if (!factor) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = factor * sum + (1 - factor) * value;
      weight = factor * weight + (1 - factor);
      return sum / weight;
    });
  }

  // The limits of the y axis. A band that is much wider than the range of the lines and their size (as with few seeds) is cut off.
  function extent(lines) {
    const [from, to] = zoom();
    const seen = (x) => (from === null || x >= from) && (to === null || x <= to);
    const all = (line, values) => values.filter((value, i) => value !== null && value !== undefined && seen(line.x[i]));
    const ys = lines.flatMap((line) => all(line, line.y)), bounds = lines.flatMap((line) => [...all(line, line.low || []), ...all(line, line.high || [])]);
    if (!ys.length) return [0, 1];
    const low = Math.min(...ys), high = Math.max(...ys);
    const most = Math.max(1.5 * (high - low), 0.5 * Math.max(Math.abs(low), Math.abs(high))) || 1;
    return around(Math.max(low - most, Math.min(low, ...bounds)), Math.min(high + most, Math.max(high, ...bounds)));
  }

  // Adds a margin around the values; a constant curve is in the middle.
  function around(low, high) {
    const room = high > low ? 0.07 * (high - low) : Math.abs(low) || 1;
    const hair = 0.02 * (high - low || room);
    return [low >= 0 && low - room < 0 ? -Math.min(hair, room) : low - room, high + room];
  }

  function table(chart) {  // uPlot needs the same x for all lines: their union, with null where a line has no point
    const xs = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const position = new Map(xs.map((x, i) => [x, i]));
    const column = (line, values) => {
      const made = new Array(xs.length).fill(null);
      line.x.forEach((x, i) => { made[position.get(x)] = values[i]; });
      return made;
    };
    return { xs, column };
  }

  function options(chart, width) {
    const factor = smoothing(), { xs, column } = table(chart), [from, to] = zoom();
    const data = [xs], series = [{ label: chart.x_name, value: (_, value) => number(value) }], bands = [];
    chart.lines.forEach((line) => {
      const ink = colour(`c${line.colour}`), dash = DASHES[line.dash % DASHES.length];
      const few = line.x.length <= 40;
      if (factor) {
        data.push(column(line, line.y));
        series.push({ label: 'not smoothed', stroke: faint(ink, 33), width: 1, points: { show: false }, spanGaps: true, value: (_, v) => number(v) });
      }
      data.push(smooth(column(line, line.y), factor));
      series.push({ label: chart.lines.length > 1 ? line.name : 'value', stroke: ink, width: 2, dash, spanGaps: true, points: { show: few, size: 5, fill: ink }, value: (_, v) => number(v) });
      if (line.low) {
        data.push(column(line, line.high), column(line, line.low));
        const at = data.length - 2, bound = { class: 'bound', width: 0, points: { show: false }, spanGaps: true };
        series.push({ ...bound, label: 'high' }, { ...bound, label: 'low' });
        bands.push({ series: [at, at + 1], fill: faint(ink, 18) });
        series[at - 1].value = (plot, v, _, i) => v === null || i === null ? number(v)
          : `${number(v)} [${number(plot.data[at + 1][i])}, ${number(plot.data[at][i])}]`;
      }
    });
    const positive = data.slice(1).some((values) => values.some((value) => value > 0));
    const scale = log() && positive ? { distr: 3, log: 10 } : {};
    if (scale.distr) data.slice(1).forEach((values, i) => { data[i + 1] = values.map((v) => (v > 0 ? v : null)); });
    const whole = xs.every(Number.isInteger);
    if (!scale.distr) scale.range = () => extent(chart.lines);
    const axis = { stroke: colour('soft'), grid: { stroke: colour('line'), width: 1 }, ticks: { show: false }, font: '12px system-ui' };
    return { data, made: {
      width, height: HEIGHT, series, bands, padding: [null, 62, null, null],
      scales: { x: { time: false, ...(from !== null || to !== null ? { range: () => [from ?? xs[0], to ?? xs.at(-1)] } : {}) }, y: scale },
      axes: [{ ...axis, grid: { show: false }, size: 34, incrs: whole ? WHOLE : undefined }, { ...axis, size: 58, values: (_, ticks) => ticks.map(number) }],
      legend: { live: true, markers: { width: 0 } },
      cursor: { points: { size: 7 }, y: false, drag: { setScale: false }, bind: { dblclick: () => () => zoomed(['', '']) } },
      hooks: {
        ready: [(plot) => plot.setLegend({ idx: xs.findLastIndex((x) => to === null || x <= to) })], draw: [(plot) => { events(plot, chart.events); ends(plot, series); }],
        setSelect: [(plot) => {
          const { left, width: wide } = plot.select;
          if (wide > 4) zoomed([left, left + wide].map((at) => Number(plot.posToVal(at, 'x').toPrecision(6))));
        }],
        setCursor: [(plot) => happened(plot, chart.events)],
      },
    } };
  }

  // Writes the events within a few pixels of the pointer below the chart.
  function happened(plot, list) {
    const output = plot.root.closest('figure')?.querySelector('.happened');
    if (!output) return;
    const near = plot.cursor.left < 0 ? [] : list.filter((event) => Math.abs(plot.valToPos(event.x, 'x') - plot.cursor.left) <= NEAR);
    output.textContent = near.map((event) => `${SIGNS[event.kind] || '•'} after ${event.x}: ${event.text}`).join(' · ');
  }

  function events(plot, list) {
    const { ctx, bbox } = plot, seen = new Map();
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px system-ui`;
    ctx.textAlign = 'center';
    for (const event of list) {
      const x = plot.valToPos(event.x, 'x', true);
      if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
      // Signs at the same x stand below each other, so that none hides another. Evaluations come first and share a place.
      const level = event.kind === 'evaluation' ? 0 : seen.get(event.x) || 0;
      seen.set(event.x, level + 1);
      ctx.fillStyle = colour(`event-${event.kind}`);
      ctx.globalAlpha = event.kind === 'evaluation' ? 0.55 : 1;
      ctx.fillText(SIGNS[event.kind] || '•', x, bbox.top + (10 + 12 * level) * devicePixelRatio);
      if (event.kind !== 'evaluation') { ctx.globalAlpha = 0.35; ctx.fillRect(x - 0.5, bbox.top, devicePixelRatio, bbox.height); }
    }
    ctx.restore();
  }

  // Writes the last value of each line at its right end; labels that would overlap are moved apart.
  function ends(plot, series) {
    const { ctx, bbox } = plot, step = 13 * devicePixelRatio;
    const last = series.flatMap((line, i) => {
      const at = i && line.points.show !== undefined && line.width === 2 ? plot.data[i].findLastIndex((value, k) => value !== null && plot.data[0][k] <= plot.scales.x.max) : -1;
      return at < 0 ? [] : [{ y: plot.valToPos(plot.data[i][at], 'y', true), value: plot.data[i][at], ink: line.stroke }];
    }).sort((a, b) => a.y - b.y);
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px system-ui`;
    ctx.textAlign = 'left';
    last.forEach((label, i) => { if (i) label.y = Math.max(label.y, last[i - 1].y + step); });
    let lowest = bbox.top + bbox.height - 4 * devicePixelRatio;  // below are the numbers of the axis
    for (const label of last.length > 10 ? [] : last.reverse()) {
      label.y = Math.min(label.y, lowest);
      lowest = label.y - step;
      ctx.fillStyle = typeof label.ink === 'function' ? label.ink() : label.ink;
      ctx.fillText(number(label.value), bbox.left + bbox.width + 4 * devicePixelRatio, label.y + 4 * devicePixelRatio);
    }
    ctx.restore();
  }

  function draw(again) {
    for (const figure of document.querySelectorAll('[data-chart]')) {
      const box = figure.querySelector('.plot'), before = drawn.get(figure.id);
      const text = figure.dataset.chart;
      if (!again && before && before.text === text && before.box === box) continue;
      before?.plot.destroy();
      const { data, made } = options(JSON.parse(text), Math.max(200, box.clientWidth));
      drawn.set(figure.id, { text, box, plot: new uPlot(made, data, box) });
    }
    for (const [id, { plot }] of drawn) if (!document.getElementById(id)) { plot.destroy(); drawn.delete(id); }
  }

  let theme = '';
  function changed() {
    const now = colour('paper');
    draw(now !== theme);
    theme = now;
  }
  document.addEventListener('treetune:changed', changed);
  document.addEventListener('input', (event) => {
    if (event.target.name === 'over') zoomed(['', '']);  // another axis
    if (['log', 'smoothing', 'from', 'to'].some((name) => [event.target.id, event.target.name].includes(name))) draw(true);
  });
  let later = null;
  addEventListener('resize', () => { clearTimeout(later); later = setTimeout(() => draw(true), 120); });
  changed();
})();
