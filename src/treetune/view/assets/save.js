// Saves the page as one HTML file with its styles, fonts and scripts; the file makes no requests.
'use strict';
(() => {
  const LEADING_BREAK = 'pre, textarea';

  async function file(address) {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
    return answer;
  }
  // With the line ends that a parser makes, because browsers compute hashes over these.
  async function text(address) { return (await (await file(address)).text()).replace(/\r\n?/g, '\n'); }
  async function dataAddress(address) {
    const blob = await (await file(address)).blob();
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(blob);
    });
  }
  async function hash(text) {
    const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', new TextEncoder().encode(text)));
    return `'sha256-${btoa(String.fromCharCode(...digest))}'`;
  }
  async function style(address) {
    // Keeps only the first format of each font, which all present browsers read.
    let css = (await text(address)).replace(/,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\("\w+"\)/g, '');
    for (const reference of new Set([...css.matchAll(/url\(([^)'"]+)\)/g)].map((match) => match[1]))) {
      css = css.replaceAll(`url(${reference})`, `url(${await dataAddress(new URL(reference, new URL(address, location.href)))})`);
    }
    return css;
  }
  // Returns whether the page has elements that need a file: `data-saved` is a selector for them.
  const needed = (element) => document.querySelector(element.dataset.saved || 'body') !== null;

  // Writes the present values of form fields as attributes.
  function controls(copy) {
    const before = document.querySelectorAll('input, select, textarea');
    copy.querySelectorAll('input, select, textarea').forEach((control, i) => {
      const now = before[i];
      if (now.matches('[type=checkbox], [type=radio]')) control.toggleAttribute('checked', now.checked);
      else if (now.matches('select')) [...control.options].forEach((option, k) => option.toggleAttribute('selected', now.options[k].selected));
      else if (now.matches('textarea')) control.textContent = now.value;
      else control.setAttribute('value', now.value);
      // These work by scripts alone, also in the file; all others need the viewer.
      if (!('own' in now.dataset) && now.id !== 'colour') { control.disabled = true; delete control.dataset.key; }
    });
  }

  function inert(copy) {
    for (const element of copy.querySelectorAll('[data-unsaved], script, link, noscript')) element.remove();
    for (const details of copy.querySelectorAll('details:has([data-later])')) details.remove();  // not loaded
    for (const plot of copy.querySelectorAll('.plot')) plot.replaceChildren();  // the script draws it again from the chart's data
    for (const formula of copy.querySelectorAll('.formula[data-done]:not(.unread)')) {
      formula.textContent = formula.firstElementChild.title;
      delete formula.dataset.done;
    }
    for (const link of copy.querySelectorAll('a[href]:not([href^="#"])')) { link.removeAttribute('href'); delete link.dataset.key; }
    for (const form of copy.querySelectorAll('form:not([method=dialog])')) {
      for (const name of ['action', 'method', 'data-instant']) form.removeAttribute(name);
      for (const button of form.querySelectorAll('button')) { button.disabled = true; delete button.dataset.key; }
    }
    for (const element of copy.querySelectorAll('*')) {
      element.removeAttribute('style');  // scripts set it again
      for (const name of ['data-href', 'data-live', 'data-fingerprint', 'data-kept', 'formaction']) element.removeAttribute(name);
    }
    copy.querySelector('dialog').open = false;
    // A parser drops the first line end in these elements.
    for (const element of copy.querySelectorAll(LEADING_BREAK)) if (element.textContent.startsWith('\n')) element.prepend('\n');
  }

  async function page(when) {
    const copy = document.documentElement.cloneNode(true);
    controls(copy);
    const head = copy.querySelector('head'), body = copy.querySelector('body');
    inert(copy);
    delete body.dataset.fingerprint;
    const add = (parent, name, text) => {
      const made = document.createElement(name);
      made.textContent = text;
      parent.append(made);
      return hash(text);
    };
    const styles = [], scripts = [];
    for (const link of document.querySelectorAll('link[rel=stylesheet]')) {
      if (needed(link)) styles.push(await add(head, 'style', await style(link.getAttribute('href'))));
    }
    for (const script of document.querySelectorAll('script[data-saved]')) {
      if (needed(script)) scripts.push(await add(body, 'script', await text(script.getAttribute('src'))));
    }
    const policy = document.createElement('meta');
    policy.httpEquiv = 'Content-Security-Policy';
    policy.content = `default-src 'none'; script-src ${scripts.join(' ')}; style-src ${styles.join(' ')}; font-src data:; img-src data:; form-action 'none'; base-uri 'none'`;
    const charset = head.querySelector('meta[charset]');
    charset.after(policy);
    head.querySelector('title').textContent = `${title()} · saved ${when}`;
    body.querySelector('#saved').textContent = `saved ${when}; this file is not updated`;
    return `<!doctype html>\n${copy.outerHTML}\n`;
  }

  const runs = () => new URLSearchParams(location.search).getAll('run');
  function title() { return ['treetune', ...new Set([document.title.replace(/ · treetune$/, ''), ...runs()])].join(' · '); }

  async function save() {
    const when = `${new Date().toISOString().slice(0, 19).replace('T', ' ')} UTC`;
    const status = document.getElementById('saved');
    try {
      const made = new Blob([await page(when)], { type: 'text/html' });
      const link = document.createElement('a');
      link.href = URL.createObjectURL(made);
      link.download = `${title()} ${when}.html`.replace(/[^\w.-]+/g, '_').slice(-150);
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      status.textContent = `saved as ${link.download}`;
    } catch (error) { status.textContent = `not saved: ${error.message}`; }
    setTimeout(() => { status.textContent = ''; }, 8000);
  }
  document.getElementById('save').addEventListener('click', save);
})();
